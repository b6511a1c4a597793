"""What tests expect of a call."""

import re

import pytest


def raises(kind, pattern, call):
    with pytest.raises(kind) as caught:
        call()
    assert re.search(pattern, str(caught.value)), f"{caught.value!s} does not say {pattern}"
