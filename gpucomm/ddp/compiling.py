"""torch.compile and the wrapper: what surrounds the module's forward is not for the compiler, as with torch's class."""

from functools import cache


@cache
def keep_compiler_out() -> None:
    """Has dynamo run the code of the wrapper as it is, and compile what it calls: the module. Once for the process."""
    # Here and not at the top: it takes a second, which stock DDP's first construction takes too.
    from torch._dynamo import trace_rules

    trace_rules.add("gpucomm.ddp")
    trace_rules.add("gpucomm.reduction")
