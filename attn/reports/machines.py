"""Devices by product name, present or not: their architectures, and the packages to expect on such a machine.

`attn explain --device H100` assumes a machine with that device, this package's extra for its framework and nothing else
installed, unless `--assume` adds packages. Names are those of the products; architectures are CUDA's compute capabilities,
LLVM's AMDGPU targets and the names of TPU generations, as in `Capabilities.archs`.
"""

import re
from collections.abc import Collection
from platform import machine
from typing import NamedTuple

from attn.backend_enum import unknown_name
from attn.capabilities import Device

#: (platform under torch or None, platform under jax or None, maker) -> architecture -> products.
_PRODUCTS: dict[tuple[str | None, str | None, str], dict[str, tuple[str, ...]]] = {
    ("cuda", "gpu", "NVIDIA"): {
        "sm_70": ("V100",),
        "sm_75": ("T4", "RTX 2080 Ti"),
        "sm_80": ("A100", "A30", "A800"),
        "sm_86": ("A10", "A10G", "A40", "RTX A6000", "RTX 3090"),
        "sm_87": ("Jetson Orin",),
        "sm_89": ("L4", "L40", "L40S", "RTX 6000 Ada", "RTX 4090"),
        "sm_90": ("H100", "H200", "H800", "H20", "GH200"),
        "sm_100": ("B200", "GB200"),
        "sm_103": ("B300", "GB300"),
        "sm_107": (),  # named by vendors' kernels; no known product
        "sm_110": ("Jetson Thor",),
        "sm_120": ("RTX 5090", "RTX PRO 6000"),
        "sm_121": ("GB10", "DGX Spark"),
    },
    ("rocm", "gpu", "AMD"): {
        "gfx90a": ("MI210", "MI250", "MI250X"),
        "gfx942": ("MI300A", "MI300X", "MI308X", "MI325X"),
        "gfx950": ("MI350X", "MI355X"),
        "gfx1100": ("RX 7900 XTX", "RX 7900 XT"),
        "gfx1151": ("Strix Halo",),
        "gfx1201": ("RX 9070", "RX 9070 XT"),
    },
    (None, "tpu", "TPU"): {
        "v4": ("v4",),
        "v5e": ("v5e",),
        "v5p": ("v5p",),
        "v6e": ("v6e", "Trillium"),
        "v7x": ("v7x", "Ironwood"),
    },
    ("xpu", None, "Intel"): {"": ("Data Center GPU Max 1550", "Arc B580")},
    ("cpu", "cpu", ""): {"x86_64": ("x86_64",), "aarch64": ("aarch64",), "arm64": ("arm64",)},
}

#: Words that drivers add to a product's name: makers and brands, memory, form factors, partitions.
# Only these words may stand beside a product's: "RTX 4090 Laptop GPU" is one, "H100 and H200" is none.
_ADDED = re.compile(
    r"nvidia|amd|intel|tpu|geforce|tesla|quadro|instinct|radeon|graphics|laptop|gpu|generation|ada|blackwell"
    r"|workstation|server|max|q|edition|oam|nvl|pcie|sxm\d*|hbm\d?e?|mig|\d+g|\d+gb"
)
#: jax's names of TPUs -> the product.
_TPU_KINDS = {"tpu v5 lite": "v5e", "tpu v5": "v5p", "tpu v6 lite": "v6e", "tpu7x": "v7x"}

#: Distribution -> the modules by which this library detects it; their submodules count too.
PACKAGES: dict[str, tuple[str, ...]] = {
    "triton": ("triton",),
    "flash-attn": ("flash_attn.flash_attn_interface",),
    "flash-attn-3": ("flash_attn_interface",),
    "flash-attn-4": ("flash_attn.cute",),
    "flashinfer-python": ("flashinfer",),
    "xformers": ("xformers",),
    "vllm": ("vllm",),
    "flash-mla": ("flash_mla",),
    "tokenspeed-mla": ("tokenspeed_mla",),
    "sageattention": ("sageattention",),
    "sageattn3": ("sageattn3",),
    "aiter": ("aiter",),
    "intel-extension-for-pytorch": ("intel_extension_for_pytorch",),
    "torch-npu": ("torch_npu",),
}
#: (framework, platform) -> those of the packages that the framework's wheel for the platform installs.
# torch's wheels require Triton; jax's do not.
BROUGHT = {("torch", "cuda"): ("triton",), ("torch", "rocm"): ("triton",), ("torch", "xpu"): ("triton",)}


class Ceilings(NamedTuple):
    """A device's rates: a copy (bytes read and written), a dense bfloat16 matrix product, and the record or datasheet."""

    copy_gb_per_s: float
    gemm_tflop_per_s: float
    source: str
    measured: bool  #: False: the datasheet's peaks, which no program reaches


#: Product -> its rates, measured with `attn bench` if the project has a record of the device, else its datasheet's peaks.
#: Datasheets with sparse rates only count half of them. GPUs with several form factors: the fastest one, as named.
CEILINGS = {
    "NVIDIA H200": Ceilings(4295.5, 799.23, "attn bench --peers all, 2026-11-22", measured=True),
    **{
        product: Ceilings(copy, gemm, f"datasheet of {variant}", measured=False)
        for product, copy, gemm, variant in (
            ("NVIDIA A100", 2039, 312, "A100 SXM 80 GB"),
            ("NVIDIA L4", 300, 121, "L4"),
            ("NVIDIA L40S", 864, 362, "L40S"),
            ("NVIDIA H100", 3350, 989, "H100 SXM"),
            ("NVIDIA H20", 4000, 148, "H20"),
            ("NVIDIA B200", 8000, 2250, "B200 (HGX)"),
            ("AMD MI250X", 3277, 383, "MI250X"),
            ("AMD MI300X", 5300, 1307, "MI300X"),
            ("AMD MI325X", 6000, 1307, "MI325X"),
            ("AMD MI355X", 8000, 2517, "MI355X"),
            ("TPU v4", 1228, 275, "TPU v4"),
            ("TPU v5e", 819, 197, "TPU v5e"),
            ("TPU v5p", 2765, 459, "TPU v5p"),
            ("TPU v6e", 1640, 918, "TPU v6e"),
            ("TPU v7x", 7380, 2307, "TPU v7x"),
        )
    },
}


class Attained(NamedTuple):
    """The share of a device's measured rates that a backend's layers reached: decodes of the copy, prompts of the product."""

    copy: float
    gemm: float | None


#: (product, backend, head size) -> shares in the record of `CEILINGS`: 64 decodes of 4,096 keys, and 4 prompts of 4,096 tokens,
#: in bfloat16, with blocks of 16 tokens, without windows and other features.
ATTAINED = {
    ("NVIDIA H200", "TRITON_ATTN", 64): Attained(0.896, None),
    ("NVIDIA H200", "TRITON_ATTN", 128): Attained(0.969, 0.628),
    ("NVIDIA H200", "TREE_ATTN", 128): Attained(0.968, 0.586),
    ("NVIDIA H200", "FLASHINFER", 128): Attained(0.900, 0.499),
    ("NVIDIA H200", "FLASH_ATTN", 128): Attained(0.804, 0.508),
}


def device_named(name: str, framework: str | None = None) -> Device:
    """Return the device called `name`, ignoring case, under a framework: by product (H100, "NVIDIA H100", v6e), by
    architecture (gfx942, sm_90), or as its driver prints it ("NVIDIA H100 80GB HBM3", "TPU v5 lite"); "cpu": this machine's.

    framework: "torch" or "jax"; None: torch if it supports the device. Raises ValueError for an unknown name, and for a
    device that the framework does not support.
    """
    name = machine() if name.lower() == "cpu" else name
    plain_name, product = _plain(name), _product(name)
    for (torch_platform, jax_platform, maker), archs in _PRODUCTS.items():
        for arch, products in archs.items():
            called = product if product in products else None
            # An empty name would equal the empty architecture of Intel's GPUs.
            if called is None and (not plain_name or plain_name != _plain(arch)):
                continue
            # TPUs have no torch platform here; all others default to torch.
            framework = framework or ("torch" if torch_platform else "jax")
            platform = {"torch": torch_platform, "jax": jax_platform}[framework]
            if platform is None:
                raise ValueError(f"device {name!r} is not supported by {framework}")
            return Device(framework, platform, f"{maker} {called or arch}".strip(), arch)
    raise ValueError(unknown_name("device", name, [p for archs in _PRODUCTS.values() for ps in archs.values() for p in ps]))


def _product(name: str) -> str | None:
    """Return the product whose words `name` has, beside words that drivers add (`_ADDED`); None if there is none."""
    if (generation := _TPU_KINDS.get(name.lower())) is not None:
        return generation
    # Intel's driver marks words within the product's name: "Intel(R) Arc(TM) B580 Graphics".
    words = re.findall(r"[a-z0-9]+", re.sub(r"\((r|tm)\)", " ", name.lower()))
    matches = []
    for (_, _, maker), archs in _PRODUCTS.items():
        for product in (product for products in archs.values() for product in products):
            name_words = re.findall(r"[a-z0-9]+", product.lower())
            # Exact, but for case, spaces and dashes: "RTX-4090", "mi300x".
            if _plain(name) in (_plain(product), _plain(f"{maker} {product}")):
                return product
            for start in range(len(words) - len(name_words) + 1):
                others = words[:start] + words[start + len(name_words) :]
                if words[start : start + len(name_words)] == name_words and all(map(_ADDED.fullmatch, others)):
                    matches.append(product)
    # The longest: "RTX 6000 Ada" has the words of shorter products too.
    return max(matches, key=len, default=None)


def product_of(name: str) -> str:
    """Return the name that this module's tables have for a device that its driver calls `name`; an unknown name unchanged."""
    try:
        return device_named(name).name
    except ValueError:
        return name


def check_arch(platform: str, arch: str) -> str:
    """Return `arch` if the platform has it. Raises ValueError with the known ones otherwise."""
    known = [a for places, archs in _PRODUCTS.items() if platform in places[:2] for a in archs if a]
    if not known:  # a list of none would not say what to pass
        raise ValueError(f"arch={arch!r}: the devices of {platform} have no architectures here: pass no arch")
    if arch not in known:
        raise ValueError(unknown_name(f"arch of {platform}", arch, known))
    return arch


def modules_of(names: Collection[str]) -> list[str]:
    """Return the modules of packages given by distribution or module name. Raises ValueError for one no backend uses."""
    imports: list[str] = []
    for name in names:
        plain_name = _plain(name)
        distribution = next((d for d, modules in PACKAGES.items() if plain_name in (_plain(d), *map(_plain, modules))), None)
        begun = [d for d in PACKAGES if len(plain_name) > 3 and _plain(d).startswith(plain_name)]
        # "flashinfer" is short for one distribution; "flash" would be any of five.
        distribution = distribution or (begun[0] if len(begun) == 1 else None)
        if distribution is None:
            raise ValueError(unknown_name("package", name, PACKAGES))
        imports += PACKAGES[distribution]
    return imports


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())


def pairs(n: int, m: int, window: int) -> int:
    """Count the visible pairs of the last n of m rows: row i (of all m) sees min(i + 1, window) keys."""
    # Of the last n rows the first sees m - n + 1 keys and each next one more, up to the window; the rest see `window` each.
    growing = range(m - n + 1, min(m, window) + 1)  # keys seen by each row that the window does not limit
    return sum(growing) + (n - len(growing)) * window
