"""Variables of the parts' processes: of NCCL's, on one host without a network, where ranks share a GPU or not."""

from collections.abc import Mapping

_MANY_RANKS_PER_GPU = 23003  # NCCL serves several ranks on one GPU from 2.30.3 on


def of_all(nccl_library: str | None) -> dict[str, str]:
    """nccl_library: one to use in place of torch's."""
    variables = {
        "NCCL_SOCKET_IFNAME": "lo",
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
        "PYTHONUNBUFFERED": "1",
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",  # without it cuBLAS is not deterministic
    }
    return variables | ({"LD_PRELOAD": nccl_library} if nccl_library else {})


def of_sharing_rank(rank: int, nccl_version: int) -> Mapping[str, str]:
    """For NCCL to take two ranks on one GPU: allowed by a variable, or before that by telling it of two hosts.

    Their kernels have to be on the GPU together, so each takes little of it.
    """
    few = {"NCCL_MAX_CTAS": "2", "NCCL_NVLS_ENABLE": "0"}
    if nccl_version >= _MANY_RANKS_PER_GPU:
        return few | {"NCCL_MULTI_RANK_GPU_ENABLE": "1"}
    return few | {"NCCL_HOSTID": f"rank{rank}", "NCCL_MNNVL_ENABLE": "0", "NCCL_IB_DISABLE": "1"}
