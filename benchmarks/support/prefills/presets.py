"""The paper's sweeps over speed, in the paper's size for a GPU and a smaller one for a CPU."""

from collections.abc import Callable
from dataclasses import dataclass, replace

from apbv import PrefillConfig, ReduceConfig
from apbv.config import SPARSE_NAMES

from support.simulated import Link, Network

FRAMES = (16, 24, 32, 40, 48, 56)
# The CPU's sizes keep the form of the sweeps; a frame of 240p has 8 x 15 tokens.
MODEL = {"cuda": "qwen2.5-vl-3b", "cpu": "qwen2.5-vl-small"}
RESOLUTION = {"cuda": "720p", "cpu": "240p"}
INFINIBAND = Link(bandwidth=25e9, latency=20e-6)  # 200 Gbit/s

SWITCHES = {"O": "overlap", "F": "fused_query", "Z": "zigzag", "V": "frame_parallel"}
SPLIT_METHODS = ("zigzag_ring", "ulysses", "star", "apb", "apbv")


@dataclass(frozen=True)
class Case:
    """One way to prefill: a method with its settings, on so many hosts.

    Attributes:
        label: its name in tables and plots.
        config: the method with its settings.
        hosts: the number of hosts.
        network: the network of simulated hosts; None for a single host.
    """

    label: str
    config: PrefillConfig
    hosts: int
    network: Network | None


@dataclass(frozen=True)
class Preset:
    """A sweep over cases, prompts and numbers of hosts.

    Attributes:
        model: a name in :data:`..workloads.CONFIGS`.
        frames, resolutions: of the prompts.
        hosts: numbers of hosts.
        cases: function of (hosts, link, base config) that returns the cases for every prompt.
    """

    model: str
    frames: tuple[int, ...]
    resolutions: tuple[str, ...]
    hosts: tuple[int, ...]
    cases: Callable[[int, Link, PrefillConfig], list[Case]]


def _all_methods(hosts: int, link: Link, base: PrefillConfig) -> list[Case]:
    names = ("full", *SPLIT_METHODS)
    return [Case(name, replace(base, method=name), hosts, Network(link)) for name in names]


def _baselines(hosts: int, link: Link, base: PrefillConfig) -> list[Case]:
    """Return the paper's baselines that save work on one GPU, too, beside all methods."""
    one_host = {
        **{name: replace(base, method=name) for name in SPARSE_NAMES},
        "slowfast, 0.5": replace(base, method="full", reduce=ReduceConfig(method="slowfast", ratio=0.5)),
    }
    alone = [Case(name, config, 1, None) for name, config in one_host.items()]
    return [*_all_methods(hosts, link, base), *alone]


def _switches(hosts: int, link: Link, base: PrefillConfig) -> list[Case]:
    """Remove one optimisation after the other; each case also lacks those before it."""
    config, label = base, "apbv"
    cases = [Case("full", replace(base, method="full"), hosts, Network(link))]
    cases.append(Case(label, config, hosts, Network(link)))
    for letter, switch in SWITCHES.items():
        config = replace(config, **{switch: False})
        label += f" -{letter}"
        cases.append(Case(label, config, hosts, Network(link)))
    return cases


def _two_tiers(hosts: int, link: Link, base: PrefillConfig) -> list[Case]:
    """Compare all hosts on the fast link with two groups of them joined by InfiniBand."""
    networks = {f"({hosts})": Network(link)}
    networks[f"({hosts // 2}, {hosts - hosts // 2})"] = Network(link, INFINIBAND, group_size=-(-hosts // 2))
    return [
        Case(f"{method} {name}", replace(base, method=method), hosts, network)
        for method in SPLIT_METHODS
        for name, network in networks.items()
    ]


# The paper's lengths, and shorter ones for the CPU's shorter prompt.
_WHOLE_BLOCKS = 10**6
_PASSING = {"cuda": (0, 128, 256, 512, _WHOLE_BLOCKS), "cpu": (0, 32, 64, 128, _WHOLE_BLOCKS)}
_ANCHOR = {"cuda": (0, 128, 256, 512, 1024), "cpu": (0, 32, 64, 128, 256)}


def _lengths(name: str, values: tuple[int, ...]) -> Callable[[int, Link, PrefillConfig], list[Case]]:
    def cases(hosts: int, link: Link, base: PrefillConfig) -> list[Case]:
        swept = [
            Case(
                "apbv, no compression" if value == _WHOLE_BLOCKS else f"apbv, {name} = {value}",
                replace(base, **{name: value}),
                hosts,
                Network(link),
            )
            for value in values
        ]
        return [*swept, Case("full", replace(base, method="full"), hosts, Network(link))]

    return cases


def _preset(device: str, cases, frames=FRAMES, resolutions: tuple[str, ...] | None = None, hosts=(8,)) -> Preset:
    return Preset(MODEL[device], frames, resolutions or (RESOLUTION[device],), hosts, cases)


def _table4(device: str) -> Preset:
    return _preset(device, _switches, resolutions=("1440p",) if device == "cuda" else None)


def _table5(device: str) -> Preset:
    return _preset(device, _all_methods, hosts=(2, 4, 6, 8))


def _table7(device: str) -> Preset:
    preset = _preset(device, _two_tiers, frames=(64,))
    return replace(preset, model="qwen2.5-vl-7b") if device == "cuda" else preset


def _table8(device: str) -> Preset:
    return _preset(device, _lengths("passing_len", _PASSING[device]), frames=(64,))


def _table9(device: str) -> Preset:
    return _preset(device, _lengths("anchor_len", _ANCHOR[device]), frames=(64,))


def _fig6(device: str) -> Preset:
    return _preset(device, _all_methods)


def _fig6_baselines(device: str) -> Preset:
    return _preset(device, _baselines)


def _fig7(device: str) -> Preset:
    sizes = {"cuda": ("360p", "480p", "720p", "1080p", "1440p"), "cpu": ("144p", "240p", "360p")}
    return _preset(device, _all_methods, frames=(64,) if device == "cuda" else (32,), resolutions=sizes[device])


PRESETS: dict[str, Callable[[str], Preset]] = {
    "table4": _table4,
    "table5": _table5,
    "table7": _table7,
    "table8": _table8,
    "table9": _table9,
    "fig6": _fig6,
    "fig6_baselines": _fig6_baselines,
    "fig7": _fig7,
}
