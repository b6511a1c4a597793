"""Accelerate's own test_distributed_data_loop, with joining switched on where ranks are on the CPU.

Accelerate joins uneven inputs on accelerators only, and its script waits for ever without.
"""

import runpy
import sys
from contextlib import contextmanager
from unittest.mock import patch

from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch.nn.parallel import DistributedDataParallel

join_uneven_inputs = Accelerator.join_uneven_inputs


@contextmanager
def join_on_the_cpu_too(self, joinables, even_batches=None):
    joins = self.multi_device or self.distributed_type == DistributedType.MULTI_CPU
    with patch.object(Accelerator, "multi_device", joins), join_uneven_inputs(self, joinables, even_batches):
        yield
    classes = {type(model).__module__ for model in joinables if isinstance(model, DistributedDataParallel)}
    sys.stdout.write("".join(f"joined {module}\n" for module in classes))


Accelerator.join_uneven_inputs = join_on_the_cpu_too
runpy.run_module("accelerate.test_utils.scripts.test_distributed_data_loop", run_name="__main__")
