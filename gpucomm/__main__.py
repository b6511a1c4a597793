"""`python -m gpucomm`: the command line."""

import sys

from gpucomm.cli import main

sys.exit(main())
