"""Generate the tables of the notes and of README.md from benchmarks/results and the recorded evidence.

    python -m benchmarks.notes.tables            report which pages are out of date
    python -m benchmarks.notes.tables --write    rewrite their tables

A page has a table between `<!-- table: NAME -->` and `<!-- end -->`; NAME is the name of a function in this module.
"""

import argparse
import json
import math
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from attn.reports import evidence
from attn.tools.bench import BenchCase, parse
from benchmarks.estimates import launches, table
from benchmarks.estimates.programs import floors

NOTES = Path(__file__).parent
RESULTS = NOTES.parent / "results"
README = NOTES.parents[1] / "README.md"
BLOCK = re.compile(r"(<!-- table: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)
CHIPS = ("v6e", "v5e", "v7x")
Row = dict[str, Any]


def load(name: str) -> Any:
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))


def markdown(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def listed(rows: Iterable[Row], columns: dict[str, Callable[[Row], str]]) -> str:
    """Return a Markdown table: one line per row, one column per heading."""
    return markdown(list(columns), [[cell(row) for cell in columns.values()] for row in rows])


def field(name: str, form: str = "") -> Callable[[Row], str]:
    """Return a function that formats a field of a row, empty if the row lacks it."""
    return lambda row: format(row[name], form) if name in row else ""


def of_target(file: str, columns: dict[str, Callable[[list[Row]], str]]) -> str:
    """Return one line per target of `attn aot`, over all its cases."""
    rows = load(file)["rows"]
    targets = dict.fromkeys(row["target"] for row in rows)
    cases = {target: [row for row in rows if row["target"] == target] for target in targets}
    return markdown(
        ["target", *columns], [[target, *(cell(own) for cell in columns.values())] for target, own in cases.items()]
    )


def count(test: Callable[[Row], Any]) -> Callable[[list[Row]], str]:
    return lambda rows: str(sum(bool(test(row)) for row in rows))


def us(value: float) -> str:
    """Format microseconds with three or more digits."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}"


# TPU


def _estimates(kinds: Sequence[str]) -> str:
    """Return the figures of `benchmarks.pallas` for our kernel and the best peer, pages of 128."""
    rows = load("pallas")["rows"]
    lines = []
    for row in (row for row in launches.ROWS if row.kind in kinds and (128 in row.pages or row.pages == (0,))):
        page = 128 if 128 in row.pages else 0
        cells = [_estimate(rows, row, chip, page) if chip in row.chips else "" for chip in CHIPS]
        lines.append([row.name, *cells])
    return markdown(["launch", *(f"{chip}: ours / best peer, us" for chip in CHIPS)], lines)


def _estimate(rows: dict[str, Any], row: launches.Row, chip: str, page: int) -> str:
    found, marks = table.own_of(rows, row, chip, page)
    limit = floors(row, chip, page)
    shown = "none" if found is None else f"**{_bounded(found, limit)}**{marks.removesuffix(' (d)')}"
    peers = [(table.peer_of(rows, row, chip, page, peer, limit)[1], peer) for peer in row.peers]
    best, name = min(peers, default=(math.inf, ""))
    return shown if best == math.inf else f"{shown} / {_bounded(best, limit)} ({name})"


def _bounded(found: float, limit: dict[str, float]) -> str:
    """Return an estimate, or the floor of HBM if the simulated time is less."""
    return us(found) if found >= limit["hbm_us"] else f"{us(limit['hbm_us'])} HBM"


def tpu_paged() -> str:
    return _estimates(["paged"])


def tpu_dense() -> str:
    return _estimates(["dense", "dense_backward"])


def tpu_dense_more() -> str:
    named = {
        "model=64,8,64,64": "causal 2k, 64/8x64, forward", "model=16,16,128,128": "causal 2k, 16/16x128, forward",
    }  # fmt: skip
    rows = [row for row in load("flash_attention_tpu_2026-11-21")["rows"] if row["case"] in named and "note" not in row]
    return listed(
        rows,
        {
            "launch": lambda row: named[row["case"]], "chip": field("chip"), "estimate us": field("estimate_us"),
            "HBM floor": field("hbm_floor_us"), "MXU floor": field("mxu_floor_us"),
            "vector spills": field("vector_spills", ","),
        },
    )  # fmt: skip


def tpu_mla() -> str:
    return _estimates(["latent", "sparse"])


def tpu_mla_blocks() -> str:
    def blocks(row: Row) -> str:
        return "{:,}, {}, {} x {}, {}".format(*row["blocks"]) if "blocks" in row else "default"

    rows = [row for row in load("mla_attention_libtpu_2026-11-21")["rows"] if row["chip"] == "v6e" and "estimate_us" in row]
    return listed(
        rows,
        {
            "launch": field("case"), "keys a block, tokens an item, score tile, blocks held": blocks,
            "estimate us": field("estimate_us"), "vector spills": field("vector_spills", ","),
        },
    )  # fmt: skip


def serving() -> str:
    def megabytes(name: str) -> Callable[[Row], str]:
        return lambda row: f"{row[name] / 1e6:.1f}"

    return listed(
        load("pallas_serving_v6e_2026-11-21")["rows"],
        {
            "backend": field("backend"), "program": field("program"), "cache MB": megabytes("cache_bytes"),
            "shared MB": megabytes("shared_bytes"), "temporaries MB": megabytes("temporary_bytes"),
        },
    )  # fmt: skip


def jax_serving_tpu() -> str:
    def gib(name: str) -> Callable[[Row], str]:
        return lambda row: f"{row[name] / 2**30:.2f}"

    return listed(
        load("jax_serving_tpu_2026-11-23")["rows"],
        {
            "devices": lambda row: f"{row['devices']} x {row['chip']}", "model": field("model"), "step": field("step"),
            "rows": field("rows", ","), "weights and caches GiB": gib("argument_bytes"), "caches GiB": gib("cache_bytes"),
            "shared GiB": gib("shared_bytes"), "temporaries GiB": gib("temporary_bytes"),
            "collectives": lambda row: ", ".join(f"{n} {name}" for name, n in row["collectives"].items()),
            "cache copies": field("cache_copies"),
        },
    )  # fmt: skip


def jax_serving_cpu() -> str:
    return listed(
        load("jax_serving_cpu_2026-11-23")["rows"],
        {
            "model": field("model"), "backend": field("backend"), "programs": field("programs"),
            "warm-up s": field("warmup_s"), "tokens": field("tokens"), "tokens/s": field("tokens_per_s"),
            "prefix tokens found": field("prefix_hit_tokens"), "preemptions": field("preemptions"),
            "requests": field("requests"), "equal to dense": field("agreeing"),
        },
    )  # fmt: skip


def aot_tpu() -> str:
    return of_target(
        "aot_tpu_2026-11-22",
        {
            "cases": count(len), "compiled": count(lambda row: row["status"] == "compiled"),
            "estimated": count(lambda row: all("us" in part for part in row["parts"])),
        },
    )  # fmt: skip


# Triton


def _of(rows: Sequence[dict[str, Any]], case: BenchCase, backend: str) -> dict[str, Any] | None:
    return next((row for row in rows if BenchCase.of(row) == case and row["backend"] == backend and row.get("ms")), None)


def _ms(value: float) -> str:
    return f"{value:.4f}" if value < 0.1 else f"{value:.3f}"


def _side_by_side(rows: Sequence[dict[str, Any]], columns: dict[str, str]) -> list[list[str]]:
    """Return one line per case: its times in ms by backend, with a rate in the first column, the fastest in bold."""
    lines = []
    for case in dict.fromkeys(map(BenchCase.of, rows)):
        found = [_of(rows, case, name) for name in columns.values()]
        least = min(row["ms"] for row in found if row)
        cells = ["" if row is None else f"**{_ms(row['ms'])}**" if row["ms"] == least else _ms(row["ms"]) for row in found]
        if first := found[0]:
            of_copy, of_gemm = first["of_copy"], first["of_gemm"]
            rate = f"{100 * of_copy:.1f} % of copy" if of_copy > of_gemm else f"{first['tflop_per_s']:.0f} TFLOP/s"
            cells[0] += f" ({rate})"
        lines.append([str(case), *cells])
    return lines


def triton() -> str:
    columns = {
        "TRITON_ATTN": "TRITON_ATTN", "FLASHINFER": "FLASHINFER", "FLASH_ATTN (FA4)": "FLASH_ATTN",
        "FA3 of vLLM": "FLASH_ATTN:vLLM's FlashAttention 3", "FlashInfer decode": "flashinfer-decode",
        "FlashInfer FA2": "flashinfer-fa2", "FlashInfer FA3": "flashinfer-fa3", "SDPA, dense keys": "sdpa",
        "vLLM Triton": "vllm-triton",
    }  # fmt: skip
    return markdown(["batch, ms", *columns], _side_by_side(load("every_peer_h200_2026-11-22")["rows"], columns))


def aot_gpu() -> str:
    def spills(rows: list[Row]) -> list[int]:
        return [part["spills"] for row in rows for part in row.get("parts", ())]

    return of_target(
        "aot_gpu_2026-11-22",
        {
            "cases": count(len), "compiled": count(lambda row: row["status"] == "compiled"),
            "refused": count(lambda row: row["status"] == "refused"),
            "programs that spill": lambda rows: f"{sum(map(bool, spills(rows)))} of {len(spills(rows))}",
            "most spills": lambda rows: f"{max(spills(rows)):,}",
        },
    )  # fmt: skip


# MLA on a GPU


def mla_kernel() -> str:
    """Rows of 16 heads with one token per request are in `mla_launches`, which is the later run."""
    rows = [row for row in load("mla_h200")["rows"] if row["heads"] != 16 or not re.fullmatch(r"decode .* q1", row["row"])]
    return listed(
        rows,
        {
            "launch": field("row"), "heads": field("heads"), "ms": field("ms", ".4f"),
            "TFLOP/s": field("tflop_per_s", ".0f"), "GB/s": field("gb_per_s", ","),
        },
    )  # fmt: skip


def mla_launches() -> str:
    rows = load("mla_launches_h200_2026-11-22")["rows"]
    launches = list(dict.fromkeys(tuple(row["launch"]) for row in rows))
    lines = []
    for name in dict.fromkeys(row["row"] for row in rows):
        rate = {tuple(row["launch"]): row["gb_per_s"] for row in rows if row["row"] == name}
        best = max(rate.values())
        lines.append([name, *(_bold(rate.get(launch), best) for launch in launches)])
    heads = ["by hand" if launch[0] == 64 else ",".join(map(str, launch)) for launch in launches]
    return markdown(["16 heads, GB/s", *heads], lines)


def _bold(value: int | None, best: int) -> str:
    return "" if value is None else f"**{value:,}**" if value == best else f"{value:,}"


def mla_beside() -> str:
    rows = load("mla_beside_flashinfer_h200_2026-11-22")["rows"]
    lines = []
    for name, heads in dict.fromkeys((row["row"], row["heads"]) for row in rows):
        ours, peer = (
            next(row for row in rows if (row["row"], row["heads"], row["backend"].strip()) == (name, heads, backend))
            for backend in ("TRITON_MLA", "FlashInfer fa3")
        )
        rate, unit = ("tflop_per_s", "TFLOP/s") if heads == 128 else ("gb_per_s", "GB/s")
        lines.append((name, str(heads), f"{ours[rate]:,.0f} {unit}", f"{peer[rate]:,.0f} {unit}"))
    return markdown(("launch", "heads", "TRITON_MLA", "FlashInfer 0.7.2 (fa3)"), lines)


def mla_layers() -> str:
    columns = {name: name for name in ("TRITON_MLA", "FLASHINFER_MLA", "FLASH_ATTN_MLA", "FLASHMLA")}
    lines = [
        line
        for heads in (128, 16)
        for line in _side_by_side(load(f"mla_layers_{heads}_h200_2026-11-22")["rows"], columns)
    ]  # fmt: skip
    return markdown(["layer, ms", *columns], lines)


def mla_prefill() -> str:
    rows = load("mla_prefill_h200_2026-11-22")["rows"]
    batches = list(dict.fromkeys(row["batch"] for row in rows))
    by_name = {
        name: {row["batch"]: row["ms"] for row in rows if row["mla_prefill"] == name}
        for name in dict.fromkeys(row["mla_prefill"] for row in rows)
    }
    ordered = sorted(by_name, key=lambda name: by_name[name][batches[0]])
    return markdown(["128 heads, ms", *batches], [[name, *(_ms(by_name[name][b]) for b in batches)] for name in ordered])


# CPU


def cpu() -> str:
    """Return ratios of processor time, as stored in the files."""
    lines = []
    one, many = (load(f"cpu_attn_{name}_2026-11-21")["rows"] for name in ("1thread", "16threads"))
    for case, dtype in dict.fromkeys((row["case"], row["dtype"]) for row in one):
        (ours, by_hand, *others), (of_many, *_) = (
            [row for row in rows if (row["case"], row["dtype"]) == (case, dtype)] for rows in (one, many)
        )
        best = min(row["speedup_of_ours"] for row in (by_hand, *others))
        share = f"{100 * ours['copy_bandwidth_share']:.0f} %" if case.startswith("decode") else ""
        lines.append(
            (
                case, dtype, f"{ours['wall_ms']:.1f}", share, f"{by_hand['speedup_of_ours']:.2f}", f"{best:.2f}",
                f"{of_many['wall_ms']:.1f}",
            )
        )  # fmt: skip
    head = ("case", "dtype", "CPU_ATTN ms", "of copy", "x loop by hand", "x best plain loop", "16 threads, ms")
    return markdown(head, lines)


# diffusion and engines


def diffusion() -> str:
    runs = {"FlashAttention 3": "h200", "FlashAttention 4": "vendors_h200", "neither": "choice_h200"}
    names = ("FLASHINFER_ATTN", "CUDNN_ATTN", "TORCH_SDPA", "FLASH_ATTN", "TRITON_ATTN", "TRITON_INT8_ATTN", "SAGE_ATTN")
    lines = []
    for label, file in runs.items():
        rows = load(f"diffusion_{file}_2026-11-22")["rows"]
        for shape, name in dict.fromkeys((row["shape"], row["name"]) for row in rows):
            own = {row["backend"]: row for row in rows if row["shape"] == shape and row["ms"]}
            best = max(row["tflop_per_s"] for row in own.values() if row["exact"])
            lines.append([f"{name} {shape}", label, *(_rate(own.get(backend), best) for backend in names)])
    return markdown(["shape, TFLOP/s", "installed", *names], lines)


def _rate(row: dict[str, Any] | None, best: float) -> str:
    if row is None:
        return ""
    shown = f"{row['tflop_per_s']:.0f}"
    return f"**{shown}**" if row["tflop_per_s"] == best else shown


def vllm() -> str:
    rows = load("vllm_cpu_2026-11-22")["rows"]
    lines = []
    for engine in dict.fromkeys(row["engine"] for row in rows):
        own = [row for row in rows if row["engine"] == engine]
        lines.append((engine, str(len(own)), str(sum(row["held"] for row in own))))
    return markdown(("vLLM", "checks", "held"), lines)


def transformers() -> str:
    columns = {
        "model": field("model"),
        "context": field("context"),
        "attention": field("attention"),
        "prefill ms": field("prefill_ms", ".1f"),
        "ms per token": field("ms_per_token", ".2f"),
        "largest difference": field("error", ".1e"),
    }
    return listed(load("transformers_cpu_2026-11-23")["rows"], columns)


# README.md

#: Column -> the rows of a report that it has the fastest of: kernels of a package, called by it or by a backend here.
RIVALS = {
    "FlashInfer": ("FLASHINFER", "flashinfer-decode", "flashinfer-fa2", "flashinfer-fa3"),
    "FlashAttention 3, 4": ("FLASH_ATTN", "FLASH_ATTN:vLLM's FlashAttention 3"),
    "vLLM's Triton": ("vllm-triton",),
    "SDPA, keys without pages": ("sdpa", "sdpa-flash", "sdpa-cudnn"),
}


def in_words(case: BenchCase) -> str:
    """Describe a batch, and where its layer differs from 32/8 heads of 128 in pages of 16."""
    groups: dict[tuple[int, int], int] = {}
    for request in parse(case.batch):
        groups[request] = groups.get(request, 0) + 1
    parts = []
    for (new, keys), count in groups.items():
        many = "s" if count > 1 else ""
        if new == 1:
            parts.append(f"{count} decode{many} of {keys:,} keys")
        elif new == keys:
            parts.append(f"{count} prompt{many} of {keys:,}")
        else:
            parts.append(f"{count} x {new} rows over {keys:,} keys" if count > 1 else f"{new} rows over {keys:,} keys")
    layer = [f"{case.heads} heads of {case.head_size}"] if (case.heads, case.head_size) != ("32/8", 128) else []
    layer += [f"pages of {case.block_size}"] if case.block_size != 16 else []
    layer += [f"{case.kv_cache_dtype} cache"] if case.kv_cache_dtype != "auto" else []
    return "; ".join([", ".join(parts), *layer])


def speed() -> str:
    return _speed("every_peer_h200_2026-11-22")


def speed_h100() -> str:
    return _speed("every_peer_h100_2026-11-26")


def _speed(file: str) -> str:
    """Return the times of the fixed batches in microseconds, and what the fastest of the others takes relative to ours."""
    rows = load(file)["rows"]
    rivals = {name: kernels for name, kernels in RIVALS.items() if any(row["backend"] in kernels for row in rows)}
    lines = []
    for case in dict.fromkeys(map(BenchCase.of, rows)):
        ours = _of(rows, case, "TRITON_ATTN")
        assert ours is not None
        fastest = {
            name: min((row["ms"] for row in (_of(rows, case, kernel) for kernel in kernels) if row), default=None)
            for name, kernels in rivals.items()
        }
        if _of(rows, case, "flashinfer-fa2") is None:
            fastest["FlashInfer"] = None  # compiled for this layer in part only
        times = [ours["ms"], *fastest.values()]
        least = min(time for time in times if time)
        cells = ["" if time is None else f"**{us(1e3 * time)}**" if time == least else us(1e3 * time) for time in times]
        others = [time for time in fastest.values() if time]
        lines.append([in_words(case), *cells, f"{min(others) / ours['ms']:.2f}" if others else ""])
    return markdown(["batch, us", "attn (TRITON_ATTN)", *rivals, "best other / attn"], lines)


def places() -> str:
    """Return where the conformance suite has run, and for which devices the kernels were compiled."""
    runs = evidence.load()
    lines = []
    for device, kind, what in (
        ("NVIDIA H200", "ran", "on the device"),
        ("x86_64 CPU", "ran", "on the device"),
        ("x86_64 CPU", "interpreted", "kernels for GPUs and TPUs in an interpreter"),
        ("x86_64 CPU", "stand-in", "adapters of vendors' packages, which a substitute replaced"),
    ):
        own = [run for run in runs if (run.device, run.kind, run.reporter) == (device, kind, "")]
        backends = len({(run.registry, run.backend) for run in own})
        cases, failures = sum(run.cases for run in own), sum(run.failures for run in own)
        lines.append([device, kind, f"{what}: {backends} backends, {cases:,} cases, {failures or 'none'} failed"])
    for file, names in AHEAD.items():
        rows = load(file)["rows"]
        for target, name in names.items():
            own = [row for row in rows if row["target"] == target]
            done = sum(row["status"] == "compiled" for row in own)
            kernels = "the" if file.startswith("aot_tpu") else "the Triton"
            lines.append([name, "compiled, **never run**", f"{done} of {len(own)} cases of {kernels} kernels"])
    return markdown(["device", "evidence", "conformance suite, or compiler"], lines)


#: File of results -> {target of `attn aot`: the devices}, without sm_90, where the kernels ran.
AHEAD = {
    "aot_tpu_2026-11-22": {"tpu-v5e": "TPU v5e", "tpu-v6e": "TPU v6e", "tpu-v7x": "TPU v7x"},
    "aot_gpu_2026-11-22": {
        "gfx942": "AMD MI300X (gfx942)",
        "gfx950": "AMD MI350X (gfx950)",
        "gfx1100": "AMD RX 7900 (gfx1100)",
        "sm_80": "NVIDIA A100 (sm_80)",
        "sm_100": "NVIDIA B200 (sm_100)",
        "sm_120": "NVIDIA RTX 5090 (sm_120)",
    },
}

TABLES: dict[str, Callable[[], str]] = {
    make.__name__: make
    for make in (
        tpu_paged, tpu_dense, tpu_dense_more, tpu_mla, tpu_mla_blocks, serving, jax_serving_tpu, jax_serving_cpu, aot_tpu,
        triton, aot_gpu, mla_kernel, mla_launches, mla_beside, mla_layers, mla_prefill, cpu, diffusion, vllm, transformers,
        speed, speed_h100, places,
    )
}  # fmt: skip


def rewritten(page: str) -> str:
    """Return a page's text with regenerated tables. Raises KeyError for a table without a function."""
    return BLOCK.sub(lambda found: found[1] + TABLES[found[2]]() + found[3], page)


def main() -> None:
    parser = argparse.ArgumentParser(description="Generate the tables of benchmarks/notes and of README.md.")
    parser.add_argument("--write", action="store_true", help="write the pages whose tables have changed")
    write = parser.parse_args().write
    for page in [README, *sorted(NOTES.glob("*.md"))]:
        before = page.read_text(encoding="utf-8")
        after = rewritten(before)
        if after != before and write:
            page.write_text(after, encoding="utf-8")
        print(f"{page.name}: {'up to date' if after == before else 'written' if write else 'out of date'}")


if __name__ == "__main__":
    main()
