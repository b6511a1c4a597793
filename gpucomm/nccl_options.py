"""What a program may say about NCCL's communicators."""

from dataclasses import asdict, dataclass, fields

_LOWEST = {"min_ctas": 1, "max_ctas": 1, "nvls_ctas": 1, "cga_cluster_size": 0, "cta_policy": 0, "traffic_class": 0}
_HIGHEST = {"cga_cluster_size": 8, "cta_policy": 2}


@dataclass(frozen=True)
class NcclOptions:
    """How a communicator of NCCL's is made and what it may take of the GPU; None: NCCL's choice. Equal on all ranks.

    All but the last are members of NCCL's ncclConfig_t, whose documentation says more; a version of NCCL that does not
    have one ignores it (nvls_ctas from 2.27 on, cta_policy and collnet_enable too, traffic_class from 2.26).

    Args:
        min_ctas, max_ctas: blocks that a collective takes of the GPU's multiprocessors, from 1 on; a lower limit only
            beside an upper one. Fewer leave more to the backward that runs beside it.
        cga_cluster_size: blocks that are launched together, 0 to 8.
        nvls_ctas: blocks for reductions in NVLink switches.
        cta_policy: 0: NCCL's own, 1: as few blocks as give the bandwidth, 2: none where copy engines can do it.
        collnet_enable: whether network switches reduce.
        traffic_class: of InfiniBand packets.
        net_name: of NCCL's network module.
        blocking: False: calls of NCCL's return before their work is on the stream. Each collective costs some 100 us
            more, and a call that hangs can be left.
        register_buffers: buckets lie in memory that NCCL knows of, so that ranks reach each other's directly (symmetric
            memory from 2.27 on; before, registered buffers). Gradients then lie beside the buckets, not in them: one
            arena more memory, and an unpack on the device after each reduction. A warning where it is not to be had.

    Raises ValueError, TypeError: naming the option and what is accepted.
    """

    min_ctas: int | None = None
    max_ctas: int | None = None
    cga_cluster_size: int | None = None
    nvls_ctas: int | None = None
    cta_policy: int | None = None
    collnet_enable: bool | None = None
    traffic_class: int | None = None
    net_name: str | None = None
    blocking: bool = True
    register_buffers: bool = False

    def __post_init__(self) -> None:
        for name, lowest in _LOWEST.items():
            self._check_number(name, lowest, _HIGHEST.get(name))
        for name in ("collnet_enable", "blocking", "register_buffers"):
            value = getattr(self, name)
            if not isinstance(value, bool) and (value is not None or name != "collnet_enable"):
                raise TypeError(f"{name} is {value!r}, accepted are True and False")
        if self.net_name is not None and (not isinstance(self.net_name, str) or not self.net_name):
            raise TypeError(f"net_name is {self.net_name!r}, accepted is the name of a network module of NCCL's")
        if self.min_ctas is not None and (self.max_ctas is None or self.max_ctas < self.min_ctas):
            raise ValueError(
                f"min_ctas is {self.min_ctas} and max_ctas {self.max_ctas}, NCCL takes a lower limit only beside an "
                "upper one that is not below it"
            )

    def _check_number(self, name: str, lowest: int, highest: int | None) -> None:
        value = getattr(self, name)
        if value is None:
            return
        if isinstance(value, bool) or not isinstance(value, int):
            raise TypeError(f"{name} is {value!r}, accepted is a whole number")
        if value < lowest or (highest is not None and value > highest):
            until = "on" if highest is None else f"to {highest}"
            raise ValueError(f"{name} is {value}, accepted is a whole number from {lowest} {until}")

    def config(self) -> dict[str, int]:
        """The members of ncclConfig_t that are to be set, but for the name of the network."""
        names = [field.name for field in fields(self) if field.name not in ("net_name", "register_buffers")]
        return {name: int(getattr(self, name)) for name in names if getattr(self, name) is not None}

    def facts(self) -> dict[str, object]:
        """For ranks to compare."""
        return {name: value for name, value in asdict(self).items() if value != getattr(NcclOptions, name)}
