"""The APB-V paper's sweeps over speed, in the paper's size for a GPU and the smaller for a CPU."""

from dataclasses import dataclass, replace

from apbv import PrefillConfig
from apbv.prefilling.methods import METHODS

from .bench import Case
from .simulated import Link, Network

INFINIBAND = Link(bandwidth=25e9, latency=20e-6)  # 200 Gbit/s
SWITCHES = {"O": "overlap", "F": "fused_query", "Z": "zigzag"}
SPLIT_METHODS = ("zigzag_ring", "ulysses", "star", "apb", "apbv")
_WHOLE_BLOCKS = 10**6


@dataclass(frozen=True)
class Sweep:
    """Parameters varied in one of the paper's tables or figures.

    Attributes:
        kind: of :func:`cases_of`.
        hosts: numbers of hosts.
        frames, resolutions: of the prompts, on a GPU and on a CPU.
        model: on a GPU.
    """

    kind: str
    hosts: tuple[int, ...] = (8,)
    frames: tuple[tuple[int, ...], tuple[int, ...]] = ((16, 24, 32, 40, 48, 56),) * 2
    # The CPU's sizes keep the form of the sweeps; a frame of 240p has 8 x 15 tokens.
    resolutions: tuple[tuple[str, ...], tuple[str, ...]] = (("720p",), ("240p",))
    model: str = "qwen2.5-vl-3b"


_64_FRAMES = ((64,), (64,))
PRESETS = {
    "table4": Sweep("switches", resolutions=(("1440p",), ("240p",))),
    "table5": Sweep("methods", hosts=(2, 4, 6, 8)),
    "table7": Sweep("networks", frames=_64_FRAMES, model="qwen2.5-vl-7b"),
    "table8": Sweep("passing_len", frames=_64_FRAMES),
    "table9": Sweep("anchor_len", frames=_64_FRAMES),
    "fig6": Sweep("methods"),
    "fig7": Sweep(
        "methods",
        frames=((64,), (32,)),
        resolutions=(("360p", "480p", "720p", "1080p", "1440p"), ("144p", "240p", "360p")),
    ),
}
# The paper's lengths, and shorter ones for the CPU's shorter prompt.
_LENGTHS = {
    "passing_len": ((0, 128, 256, 512, _WHOLE_BLOCKS), (0, 32, 64, 128, _WHOLE_BLOCKS)),
    "anchor_len": ((0, 128, 256, 512, 1024), (0, 32, 64, 128, 256)),
}


def cases_of(kind: str, hosts: int, link: Link, base: PrefillConfig, on_cpu: bool) -> list[Case]:
    """Return the methods that a sweep compares on a number of hosts; methods that do not split run on one."""
    configs = {name: replace(base, method=name) for name in ("full", *SPLIT_METHODS)}
    networks = {"": Network(link)}
    if kind == "switches":  # without one optimisation after the other
        label, config = "apbv", base
        configs = {"full": configs["full"], label: config}
        for letter, switch in SWITCHES.items():
            label, config = f"{label} -{letter}", replace(config, **{switch: False})
            configs[label] = config
    elif kind == "networks":  # all hosts on the fast link, and two groups of them joined by InfiniBand
        groups = Network(link, INFINIBAND, group_size=-(-hosts // 2))
        networks = {f" ({hosts})": Network(link), f" ({hosts // 2}, {hosts - hosts // 2})": groups}
        del configs["full"]
    elif kind != "methods":
        configs = {"full": configs["full"]}
        for length in _LENGTHS[kind][on_cpu]:
            label = "apbv, no compression" if length == _WHOLE_BLOCKS else f"apbv, {kind} = {length}"
            configs[label] = replace(base, **{kind: length})
    return [
        Case(f"{label}{name}", config, hosts, network) if METHODS[config.method].splits else Case(label, config)
        for label, config in configs.items()
        for name, network in networks.items()
    ]
