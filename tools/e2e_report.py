"""What bench_e2e found of a model, as a table and as a row of the log."""

from dataclasses import asdict, dataclass, field
from typing import Any

from tools.breakdown import FUSED, GAP, Share, total
from tools.gpu import Spread
from tools.qwen2_engines import Mode
from tools.timeline import Times, timeline_lines

MODES: tuple[Mode, ...] = ("device", "host", "eager")


@dataclass(frozen=True)
class Regions:
    """A token's time by region; the same time as the loop's log has it; what does not fit; bytes read by region; and
    where it was asked for, a layer's times by part."""

    mode: Mode
    prompt: int
    shares: dict[str, Share]
    itl_us: float
    problems: list[str]
    read: dict[str, int]
    times: dict[str, Times] = field(default_factory=dict)


def lines(found: dict[str, Any], ceiling: float) -> list[str]:
    """A model's table."""
    size = found["bytes"]
    table = [
        f"{found['model']}: prompt {found['prompt']}, {found['gen']} tokens; form {found['form']}; a token: "
        f"{found['launches']} launches, {size / 1e9:.3f} GB, {size / ceiling / 1e3:.0f} µs at {ceiling:.0f} GB/s",
        f"{'':10} {'TTFT ms':>22} {'ITL ms':>25} {'tokens/s':>9} {'GB/s':>6} {'of ceiling':>10}",
    ]
    rows: list[tuple[str, Any, int]] = [(mode, found[mode], size) for mode in MODES]
    if "context" in found:
        rows.append((f"{found['context']['prompt']}", found["context"], size + found["context"]["added_bytes"]))
    for name, one, read in rows:
        ttft, itl = one["ttft_ms"], one["itl_ms"]
        speed = read / itl.median / 1e6
        table.append(
            f"{name:10} {ttft.median:7.2f} ({ttft.low:.2f} to {ttft.high:.2f}) "
            f"{itl.median:9.4f} ({itl.low:.4f} to {itl.high:.4f}) "
            f"{1e3 / itl.median:9.1f} {speed:6.0f} {speed / ceiling:10.1%}"
        )
    clock = found["clock_us"]
    table.append(f"device, by its own clock: {clock.median:.1f} µs a token ({clock.low:.1f} to {clock.high:.1f})")
    if "context" in found:
        one = found["context"]
        table.append(
            f"{one['prompt']} tokens of context add {one['extra_us']:.1f} µs and {one['added_bytes'] / 1e6:.1f} MB, "
            f"{one['ratio']:.2f} times as long as reading these takes"
        )
    for name, one in found.get("breakdowns", {}).items():
        title = f"{one.mode} after {one.prompt}"
        table += region_lines(title, one, found[name]["itl_ms"].median * 1e3, ceiling)
        if one.times:
            table += timeline_lines(title, one.times)
    if "breakdowns" in found:
        table += [f"{region}: {text}" for region, text in FUSED.items()]
    return [*table, *(f"PROBLEM: {text}" for text in found["problems"])]


def region_lines(title: str, one: Regions, untraced_us: float, ceiling: float) -> list[str]:
    """A breakdown's table."""
    whole = total(one.shares)
    table = [f"{title:20} {'µs':>9} {'share':>7} {'waiting':>8} {'launches':>8} {'MB':>8} {'of ceiling':>10}"]
    for region, share in one.shares.items():
        read = one.read.get(region, 0)
        speed = f"{read / share.us / 1e3 / ceiling:10.1%}" if read > 1e6 and share.us else ""
        table.append(
            f"  {region:18} {share.us:9.2f} {share.us / whole:7.1%} {share.waiting:8.2f} {share.launches:8.0f} "
            f"{read / 1e6:8.2f} {speed}"
        )
    gap = one.shares.get(GAP, Share()).us
    table.append(
        f"  {'sum':18} {whole:9.2f}; ITL {one.itl_us:.2f} traced, {untraced_us:.2f} untraced; "
        f"{GAP} {gap / whole:.2%} of the sum"
    )
    return table


def plain(value: Any) -> Any:
    """A report's parts as JSON has them."""
    if isinstance(value, Regions):
        shares = {region: asdict(share) for region, share in value.shares.items()}
        times = {name: asdict(one) for name, one in value.times.items()}
        return {"prompt": value.prompt, "itl_us": value.itl_us, "regions": shares, "bytes": value.read, "times": times}
    if isinstance(value, Spread):
        return value._asdict()
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items() if key != "tokens"}
    return value
