"""Test the adapters of vendors' packages on a CPU, each in a separate environment that this script creates.

    python benchmarks/vendors_cpu.py ipex               the conformance suite on IPEX's own kernels
    python benchmarks/vendors_cpu.py xformers           the same on xformers' masks and its Triton kernel, interpreted

IPEX runs unchanged. xformers has no CPU operator: its split-K kernel runs in Triton's interpreter, in float16, which the
interpreter computes correctly; every other mask is materialised by xformers (`materialize`) and applied in float64, which tests
that the adapter's masks are right, but no kernel. On Linux, PyPI's torch includes CUDA (gigabytes); `--torch VERSION` selects
another build if pip finds one.
"""

import argparse
import os
import subprocess
import sys
import venv
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
#: name: (packages to install besides torch, the required torch, environment variables)
VENDORS: dict[str, tuple[tuple[str, ...], str, dict[str, str]]] = {
    "ipex": (("intel-extension-for-pytorch==2.8.0", "numpy<2.4"), "2.8.0", {}),
    "xformers": (
        ("xformers==0.0.35", "triton==3.6.0", "numpy<2.4"), "2.11.0", {"TRITON_INTERPRET": "1", "XFORMERS_ENABLE_TRITON": "1"},
    ),
}  # fmt: skip


def make(name: str, place: Path, torch_version: str) -> Path:
    """Create the environment, if needed, and return its Python."""
    packages, _, _ = VENDORS[name]
    python = place / ("Scripts" if os.name == "nt" else "bin") / "python"
    if not python.exists():
        venv.create(place, with_pip=True)
    subprocess.run([python, "-m", "pip", "install", "--quiet", f"torch=={torch_version}", packages[-1]], check=True)
    # without its dependencies: xformers requires an exact torch version, but the caller chooses the build
    subprocess.run([python, "-m", "pip", "install", "--quiet", "--no-deps", *packages[:-1]], check=True)
    subprocess.run([python, "-m", "pip", "install", "--quiet", "psutil", "packaging"], check=True)
    return python


def run_ipex(level: str) -> int:
    from attn.cli import main

    return main(["conform", "IPEX", "--level", level])


def run_xformers(level: str) -> int:
    import torch
    import xformers
    import xformers.ops.fmha as fmha

    from attn.testing.conformance import run_case
    from attn.testing.subject import subject_of
    from attn.testing.suite import cases_of
    from attn.torch.backends.xformers import XFormersAttentionBackend as Backend

    launched: Counter[str] = Counter()

    class Materialised(fmha.AttentionFwOpBase):  # type: ignore[misc]
        """Compute attention under any mask, materialised by xformers; -inf excludes keys."""

        @classmethod
        def apply(cls, inp: Any, needs_gradient: bool) -> Any:
            launched[type(inp.attn_bias).__name__] += 1
            q, k, v = (x[0].double() for x in inp.get_qkv_in_bmghk())
            bias = inp.attn_bias.materialize((q.shape[0], k.shape[0]), dtype=torch.float64)
            scores = torch.einsum("tghd,sghd->ghts", q, k) * inp.scale_float
            scores = torch.where(bias == 0, scores, -torch.inf)
            log, weights = torch.logsumexp(scores, -1), torch.softmax(scores, -1)
            # a value with weight 0 may be NaN: the suite tests that, not the mask
            clean = torch.where((bias == 0).any(0)[:, None, None, None], v, 0)
            out = torch.einsum("ghts,sghd->tghd", weights, clean).to(inp.query.dtype)[None]
            return out, fmha.Context(out=out, lse=log[None].float())

    apply = fmha.triton_splitk.FwOp.apply.__func__

    def counted(cls: Any, inp: Any, needs_gradient: bool) -> Any:
        launched["triton_splitk, interpreted"] += 1
        return apply(cls, inp, needs_gradient)

    fmha.triton_splitk.FwOp.apply = classmethod(counted)
    fmha.triton_splitk.FwOp.SUPPORTED_DEVICES = {"cuda", "cpu"}
    fmha._dispatch_fw = lambda inp, needs_gradient: Materialised
    torch.cuda.get_device_capability = lambda device=None: (9, 0)  # type: ignore[assignment]  # asked for block sizes

    subject = subject_of(Backend)
    own = replace(subject, capabilities=replace(subject.capabilities, dtypes=("float16",)))
    cases = [case for case in cases_of(own, level) if case.dtype == "float16" and case.check == "oracle"]
    paged = [c for c in cases if c.block_size == 16 and c.head_size == 64 and 1 in c.query_lens and not c.sliding_window]
    cases += [c.replace(name=f"{c.name}, pages of 64", block_size=64, num_blocks=None) for c in paged if not c.is_encoder]
    bad = [(case, found) for case in cases if (found := run_case(Backend, case))]
    print(f"XFORMERS on xformers {xformers.__version__}: {len(cases)} cases, {len(bad)} failed")
    print("\n".join(f"    {count:4} calls of {what}" for what, count in launched.most_common()))
    for _, found in bad[:10]:
        print("\n".join(map(str, found)))
    return int(bool(bad))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("vendor", choices=VENDORS)
    parser.add_argument("--env", type=Path, help="directory of the environment (default: build/vendors/VENDOR)")
    parser.add_argument("--torch", help="version of torch (default: what the vendor's wheel was built for)")
    parser.add_argument("--level", default="quick", help="the suite's level (default: %(default)s)")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.inside:
        return {"ipex": run_ipex, "xformers": run_xformers}[args.vendor](args.level)
    _, torch_version, variables = VENDORS[args.vendor]
    python = make(args.vendor, args.env or ROOT / "build" / "vendors" / args.vendor, args.torch or torch_version)
    command = [str(python), str(Path(__file__).resolve()), args.vendor, "--inside", "--level", args.level]
    environ = os.environ | {"PYTHONPATH": str(ROOT)} | variables
    return subprocess.run(command, cwd=ROOT, env=environ, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
