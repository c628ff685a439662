"""Shows the figures of a benchmark: tables, and a plot over page sizes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.util import find_spec

from peercache.cli.terminal import console, table
from peercache.errors import ConfigError

Figures = Mapping[str, float]

_ROWS = (
    ("get", "get_gb_s", "GB/s", "get_ratio"),
    ("get, busy Python thread", "get_busy_gb_s", "GB/s", "get_busy_ratio"),
    ("get, TLS", "tls_get_gb_s", "GB/s", "tls_get_ratio"),
    ("get, TLS, busy Python thread", "tls_get_busy_gb_s", "GB/s", "tls_get_busy_plain_ratio"),
    ("set", "set_gb_s", "GB/s", "set_ratio"),
    ("set into a full pool", "set_full_gb_s", "GB/s", "set_full_ratio"),
    ("set, busy Python thread", "set_busy_gb_s", "GB/s", "set_busy_ratio"),
    ("exists of 128, hot", "exists_hot_us", "µs", "exists_hot_trips"),
    ("exists of 128, cold", "exists_cold_us", "µs", "exists_cold_trips"),
    ("control round trip under tcp load, p99", "control_p99_ms", "ms", ""),
    ("the same beside a raw stream, p99", "limit_control_p99_ms", "ms", ""),
    ("limit: memory copy", "limit_copy_gb_s", "GB/s", ""),
    ("limit: one tcp stream", "limit_tcp_gb_s", "GB/s", ""),
    ("limit: one stream of bare OpenSSL", "limit_tls_gb_s", "GB/s", ""),
    ("limit: nng round trip", "limit_rtt_us", "µs", ""),
)

_DISK_ROWS = (
    ("write-through", "spill_gb_s", "GB/s", "spill_ratio"),
    ("load", "load_gb_s", "GB/s", "load_ratio"),
    ("load of one page", "load_one_ms", "ms", ""),
    ("load of one page, p99", "load_one_p99_ms", "ms", ""),
    ("promote of one page, remote reader", "promote_ms", "ms", ""),
    ("set, the disk keeping up", "set_disk_gb_s", "GB/s", ""),
    ("device: write", "raw_write_gb_s", "GB/s", ""),
    ("device: read", "raw_read_gb_s", "GB/s", ""),
    ("index: load", "index_load_s", "s", ""),
    ("index: memory a page", "index_bytes_a_page", "bytes", ""),
)


def print_local(title: str, figures: Figures) -> None:
    """Print what `bench local` and `bench drive` measured, beside the machine's limits."""
    _print_table(title, "of the limit", _ROWS, figures)
    print(f"  {figures['wrong_bytes']:.0f} wrong bytes, {figures.get('misses', 0):.0f} misses")


def print_disk(title: str, figures: Figures) -> None:
    """Print what the disk tier does, beside what the device does."""
    _print_table(title, "of the device", _DISK_ROWS, figures)
    print(f"  set is {figures['set_disk_ratio']:.2f} of its rate without a disk")
    if not figures["direct"]:
        print("  through the page cache: this file system refuses direct I/O")


def _print_table(
    title: str, of: str, rows: Sequence[tuple[str, str, str, str]], figures: Figures
) -> None:
    """Print a row for each figure that was measured; the ratio is to a limit of the same run."""
    shown = table("what", "median", "", of, title=title)
    for name, key, unit, ratio in rows:
        if key in figures:
            share = f"{figures[ratio]:.2f}" if ratio in figures else ""
            share += " trips" if share and ratio.endswith("_trips") else ""
            shown.add_row(name, f"{figures[key]:.2f}", unit, share)
    console().print(shown)


def rdma_table(figures: Figures, sizes: Sequence[int]) -> str:
    """Return what READs did beside the bare loop, a line a page size."""
    lines = []
    for size in sizes:
        name = f"{size >> 10}k"
        if f"get_gb_s_{name}" not in figures:
            continue
        ours, bare, ratio, wrong = (
            figures[f"{what}_{name}"]
            for what in ("get_gb_s", "bare_gb_s", "get_ratio", "wrong_pages")
        )
        tool = figures.get(f"ib_read_bw_gb_s_{name}")
        lines.append(
            f"  pages of {size >> 10:5} KiB  ours {ours:7.3f} GB/s, bare loop {bare:7.3f}"
            f" (ratio {ratio:.2f})"
            + (f", ib_read_bw {tool:.3f}" if tool else "")
            + f", {wrong:.0f} wrong pages"
        )
    return "".join(f"{line}\n" for line in lines)


def require_plotting() -> None:
    """Raise ConfigError where matplotlib is missing, before minutes of measuring."""
    if find_spec("matplotlib") is None:
        raise ConfigError("plot", "needs matplotlib: pip install matplotlib")


def plot(path: str, fabric: str, by_page_bytes: Sequence[tuple[int, Figures]]) -> None:
    """Draw throughput over page size beside the limits into a PNG."""
    import matplotlib as mpl  # noqa: PLC0415 - an extra that only this needs

    mpl.use("Agg")
    from matplotlib import pyplot as plt  # noqa: PLC0415 - after the backend is chosen

    sizes = [size / 1024 for size, _ in by_page_bytes]
    figure, axes = plt.subplots(figsize=(8, 5))
    lines = (
        ("get_gb_s", "get", "o-"),
        ("set_gb_s", "set", "s-"),
        ("set_full_gb_s", "set, pool full", "^-"),
        ("limit_copy_gb_s", "limit: memory copy", "k--"),
        ("limit_tcp_gb_s", "limit: one tcp stream", "k:"),
    )
    for key, label, style in lines:
        axes.plot(sizes, [figures[key] for _, figures in by_page_bytes], style, label=label)
    axes.set(xscale="log", xlabel="page size, KiB", ylabel="GB/s", title=f"fabric: {fabric}")
    axes.set_xticks(sizes, [f"{size:g}" for size in sizes])
    axes.set_ylim(bottom=0)
    axes.grid(visible=True, alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120, bbox_inches="tight")
    plt.close(figure)
