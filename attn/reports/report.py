"""Reports: tables of the three registries, and the explanation of one choice.

Everything shown is derived: names and paths from the registries, limits from the capability records, verdicts from the
current device of each backend's framework, evidence from recorded conformance runs. A broken backend raises nothing: its
row reports the error.
"""

import contextlib
import os
import platform as host
import sys
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from html import escape
from typing import Any

import attn
from attn import envs, imports, selector
from attn.arguments import list_of_names
from attn.backend_enum import load_candidate, registries
from attn.backends.registry import AttentionBackendEnum, blocksparse_candidate
from attn.capabilities import FRAMEWORKS, AttentionType, Candidate, Capabilities, Device, Feature, check_known
from attn.dtypes import framework_of_dtype
from attn.imports import version_of
from attn.reports import evidence, machines
from attn.reports.hints import hints
from attn.selection import plugins
from attn.selection.platforms import platform_for
from attn.selection.verdicts import Selection, not_loadable
from attn.tables import block, html, markdown, plain, wrapped

# Resolved here, at import: this module shows all three, and `attn --help` does not import it.
REGISTRIES = registries()
NOT_BUILT = "not built yet"
_COLUMNS = ("backend", "runs on", "types and sizes", "features", "evidence")
MARKS = ("<!-- backends:begin -->", "<!-- backends:end -->")
#: Distributions that decide what runs; `attn env` prints their versions.
DISTRIBUTIONS = ("attn", "numpy", "torch", *machines.PACKAGES, "jax", "jaxlib", "libtpu", "flax", "transformers", "diffusers")


@dataclass(frozen=True)
class BackendRow:
    """One backend: its origin, whether it runs on this machine, what it serves, and its recorded evidence.

    `framework` is "" for a backend that belongs to neither; `origin` is built-in, overridden, custom or plugin; `reasons`
    say why it does not run on this machine (empty: it does); `evidence`: the recorded conformance runs; `limits` are a
    diffusion backend's limits beyond its capabilities, including its declared error.
    """

    registry: str
    name: str
    path: str
    origin: str
    framework: str
    reasons: tuple[str, ...]
    capabilities: Capabilities | None = None
    block_sizes: tuple[str, ...] = ()
    features: tuple[str, ...] = ()
    evidence: str = ""
    limits: tuple[str, ...] = ()

    @property
    def built(self) -> bool:
        return not any(reason.startswith(NOT_BUILT) for reason in self.reasons)

    @property
    def verdict(self) -> str:
        """`available`, `not built yet`, or every reason why it does not run on this machine."""
        if not self.built:
            return NOT_BUILT
        return "; ".join(self.reasons) or "available"

    @property
    def serves(self) -> str:
        """The capability record in one line."""
        record = self.capabilities
        if record is None:
            return ""
        parts = [" ".join(record.dtypes), f"head_size {', '.join(map(str, record.head_sizes))}"]
        parts += [f"block_size {', '.join(self.block_sizes)}"] if self.block_sizes else []
        parts += [
            f"kv cache {' '.join(record.kv_cache_dtypes)}",
            " ".join(record.attn_types),
            " ".join(self.features),
            ", ".join(self.limits),
        ]
        return " · ".join(part for part in parts if part)

    def to_dict(self) -> dict[str, Any]:
        """Return the row as plain data."""
        record = self.capabilities
        return {
            "registry": self.registry,
            "backend": self.name,
            "path": self.path,
            "origin": self.origin,
            "framework": self.framework or None,
            "available": not self.reasons,
            "reasons": list(self.reasons),
            "evidence": self.evidence,
            "capabilities": record
            and {
                **{name: plain(getattr(record, name)) for name in ("platforms", "packages", "install", "dtypes")},
                "head_sizes": list(map(str, record.head_sizes)),
                "block_sizes": list(self.block_sizes),
                **{name: plain(getattr(record, name)) for name in ("kv_cache_dtypes", "attn_types")},
                **{name: plain(getattr(self, name)) for name in ("features", "limits")},
            },
        }


@dataclass(frozen=True)
class BackendTable:
    """Rows of `backends()`; prints as text, displays as a table in notebooks. `devices`: each framework's device."""

    rows: tuple[BackendRow, ...]
    devices: Mapping[str, str]

    def __iter__(self) -> Iterator[BackendRow]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, name: str) -> BackendRow:
        """Return the first row called `name`. Raises KeyError."""
        # Attention backends first, in the order of `REGISTRIES`: names repeat in the other registries.
        for row in self.rows:
            if row.name == name:
                return row
        raise KeyError(name)

    def __str__(self) -> str:
        return self.text()

    def text(self, wide: bool = False) -> str:
        """Format the table in lines of 100 characters; `wide`: with what each backend serves and its evidence, a line each."""
        head = ("backend", "framework", "here", "evidence", "serves")
        lines = [f"{framework}: {device}" for framework, device in self.devices.items()]
        for registry in dict.fromkeys(row.registry for row in self.rows):
            lines += ["", f"{registry} backends"]
            rows = [row for row in self.rows if row.registry == registry]
            cells = [head, *((row.name, row.framework, row.verdict, row.evidence, row.serves) for row in rows)]
            if wide:
                lines += block(cells, "  ")
                continue
            # Continuations begin below the verdict, the third column, whose text is the long one.
            more = " " * (4 + max(len(row.name) for row in rows) + len("framework"))
            for line in block([row[:3] for row in cells]):
                lines += wrapped(line, "  ", more)
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        rows = [
            (row.registry, f"<b>{escape(row.name)}</b>", *map(escape, (row.framework, row.verdict, row.evidence, row.serves)))
            for row in self.rows
        ]
        devices = ", ".join(f"{framework}: {device}" for framework, device in self.devices.items())
        return f"<p>{escape(devices)}</p>{html(('registry', 'backend', 'framework', 'here', 'evidence', 'serves'), rows)}"

    def to_dict(self) -> dict[str, Any]:
        """Return the table as plain data, for `--json`."""
        return {"devices": dict(self.devices), "backends": [row.to_dict() for row in self.rows]}


def backends(registry: str | None = None) -> BackendTable:
    """List the backends of every registry (or of one: attention, mla_prefill, diffusion), including custom ones and plugins.

    Raises ValueError for an unknown registry only.
    """
    if registry is not None:
        check_known("registry", registry, REGISTRIES)
    reports = plugins.load()
    devices = {framework: _device(framework) for framework in FRAMEWORKS}
    rows = []
    for name, registered in REGISTRIES.items():
        if registry in (None, name):
            rows += [_row(name, registered[n], reports, devices) for n in registered.names()]
            rows += [_described(name, candidate, "built-in", devices) for candidate in _beside(name)]
            # Plugins register in the registry of attention backends, so their failures are listed there, where a reader
            # looks for the name.
            failed = [report for report in reports.values() if name == "attention" and report.problem]
            rows += [BackendRow(name, p.name, p.value, "plugin", "", (f"plugin not loaded: {p.problem}",)) for p in failed]
    return BackendTable(tuple(rows), {framework: str(device) for framework, device in devices.items()})


def explain(
    head_size: int,
    dtype: Any,
    kv_cache_dtype: str | None = None,
    block_size: int | None = 16,
    *,
    features: Collection[str] = (),
    attn_type: str = AttentionType.DECODER,
    use_mla: bool = False,
    num_heads: int | None = None,
    num_kv_heads: int | None = None,
    backend: AttentionBackendEnum | str | None = None,
    framework: str | None = None,
    device: Device | str | None = None,
    disable: Collection[str] = (),
    assume: Collection[str] | None = None,
) -> Selection:
    """Explain which backend a layer would get and why each other candidate was rejected; print the result.

    Arguments are those of `get_attn_backend` and `attn.selector.select`, and:
        backend: require this backend, by name.
        device: explain for this device, present or not: a `Device` or a product's name ("H100", "MI300X", "v6e").
        assume: distributions assumed to be installed (`["flashinfer"]`), in addition to the framework and what its wheel
            installs. None: no others with `device`; without it, those installed on this machine.

    `Selection.source` says what made the choice: `argument`, `context` (a force), `backend_per_kind[...]`, the name of an
    environment variable, or `priority` (the platform's list); `Selection.notes` list assumptions and what would change the
    answer. Raises ValueError for malformed arguments; a request that no backend serves is a `Selection` without a winner.
    """
    request = selector.make_request(
        head_size,
        dtype,
        kv_cache_dtype,
        block_size,
        use_mla=use_mla,
        attn_type=attn_type,
        features=features,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
    )
    # A product's name ("H100") is described under this framework, so it is needed before the selector would find it.
    framework = framework or framework_of_dtype(dtype)
    with assumed_machine(device, framework, assume) as (target, elsewhere, assumed):
        selection = selector.select(request, framework=framework, backend=backend, device=target, disable=disable)
        # Faster paths that are off depend on packages and compilers that are installed, which are not known of another
        # machine.
        if elsewhere:
            notes = [f"assumed to be installed: {', '.join([selection.device.framework, *assumed])}" + _MORE * (assume is None)]
        else:
            notes = [f"assumed in addition to what is installed: {', '.join(assumed)}"] if assumed else []
            notes += AttentionBackendEnum[selection.name].off_paths(selection.device) if selection.name else ()
        if selection.name:
            notes += AttentionBackendEnum[selection.name].rules(selection.device)
        # Within the assumption: hints try further packages beside those assumed.
        return replace(selection, notes=(*notes, *hints(selection)))


@contextlib.contextmanager
def assumed_machine(
    device: Device | str | None, framework: str | None, assume: Collection[str] | None
) -> Iterator[tuple[Device | None, bool, list[str]]]:
    """Assume the packages of a machine with `device` while the context is open, as `explain` documents.

    Yields (the device, or None for this machine's; whether it is another machine's; the packages assumed).
    """
    target = machines.device_named(device, framework) if isinstance(device, str) else device
    named = list_of_names("assume", () if assume is None else assume)
    # The device of this machine that the description could mean, if there is one of its platform.
    current = platform_for(target.framework, target.platform).device() if target else None
    # Drivers print longer names than products have ("NVIDIA H100 80GB HBM3"): compared by product, `--device H100` on
    # such a machine means this one, with its packages.
    by_product = [one and replace(one, name=machines.product_of(one.name)) for one in (target, current)]
    elsewhere = by_product[0] != by_product[1]
    brought = machines.BROUGHT.get((target.framework, target.platform), ()) if target and elsewhere else ()
    # Without repetitions and in order, as the note prints them.
    assumed = list(dict.fromkeys([*brought, *named]))
    with imports.assuming(machines.modules_of(assumed), beside=not elsewhere):
        yield target, elsewhere, assumed


#: Suffix of the note on the default assumption.
_MORE = ", which the framework's wheel installs (add packages with --assume or assume=)"


def environment() -> dict[str, Any]:
    """Return the facts for a bug report: versions, devices, environment variables, and plugins with their status."""
    facts = {name: version_of(name) for name in DISTRIBUTIONS}
    return {
        "attn": attn.__version__,
        "python": sys.version.split()[0],
        "system": f"{host.system()} {host.release()} {host.machine()}, {os.cpu_count()} cores",
        "versions": {name: version for name, version in facts.items() if version and name != "attn"},
        "devices": {framework: str(_device(framework)) for framework in FRAMEWORKS},
        "variables": {name: value for name in envs.VARIABLES if (value := envs.read(name)) is not None},
        "plugins": {name: report.problem or f"ok: {report.value}" for name, report in plugins.load().items()},
        "unknown variables": {name: f"did you mean {meant}?" if meant else "unknown" for name, meant in envs.unknown().items()},
        "faster paths that are off": _all_off_paths(),
    }


def _all_off_paths() -> dict[str, str]:
    """{registry and backend: the faster paths that are off} for the backends that run on this machine."""
    off_paths = {}
    for row in backends():
        registry = REGISTRIES[row.registry]
        if row.reasons or row.name not in registry:
            continue
        try:
            sentences = registry[row.name].off_paths()
        except Exception as error:  # third-party classes may raise anything; report it in the entry
            # A report of a bug must not fail because of it.
            sentences = (f"broken: {type(error).__name__}: {error}",)
        if sentences:
            off_paths[f"{row.registry} {row.name}"] = "; ".join(sentences)
    return off_paths


def backend_tables() -> str:
    """Return the Markdown tables of built-in backends, identical on every machine that has both frameworks.

    Overrides, custom backends and the current device have no effect.
    """
    sections = []
    for name, registered in REGISTRIES.items():
        title = f"{registered.label[0].upper()}{registered.label[1:]}s"
        # By the default paths, `m.value`: an override is of this process, the table is of the package.
        members = [load_candidate(m.name, m.value) if m.value else Candidate(m.name) for m in registered]
        rows = [_table_cells(name, candidate) for candidate in (*members, *_beside(name))]
        table = map(markdown, [_COLUMNS, ["---"] * len(_COLUMNS), *rows])
        sections.append("\n".join([f"**{title}** (`attn backends --registry {name}`)", "", *table]))
    return "\n\n".join(sections) + "\n"


def replace_tables(page: str) -> str:
    """Return `page` with the text between the two marks regenerated. Raises ValueError when a mark is missing."""
    begin, end = MARKS
    # The prose around the marks is written by hand and kept.
    before, opened, content = page.partition(begin)
    _, closed, after = content.partition(end)
    if not opened or not closed:
        raise ValueError(f"the page must contain {begin} followed by {end}")
    return f"{before}{begin}\n\n{backend_tables()}\n{end}{after}"


def _device(framework: str) -> Device | str:
    """A framework's current device, or the reason why it has none."""
    try:
        return platform_for(framework).device()
    except Exception as error:  # a driver may raise anything; the other framework's rows must still appear
        return str(error) or type(error).__name__


def _row(registry: str, member: Any, reports: Mapping[str, Any], devices: Mapping[str, Any]) -> BackendRow:
    candidate = member.candidate()
    report = reports.get(member.name)
    custom = member.name not in type(member).__members__
    # A report with a problem is of an entry point whose name was taken by another registration: that one is not the plugin's.
    origin = "plugin" if custom and report is not None and not report.problem else "custom" if custom else "built-in"
    if origin == "built-in" and member.is_overridden():
        origin = "overridden"
    return _described(registry, candidate, origin, devices)


def _described(
    registry: str, candidate: Candidate, origin: str, devices: Mapping[str, Any], *, judge: bool = True
) -> BackendRow:
    capabilities, framework, served = None, _framework_of_path(candidate.path), dict[str, Any]()
    reasons = list(not_loadable(candidate))
    backend: Any = candidate.backend
    try:
        capabilities = getattr(backend, "capabilities", None)
        if capabilities is not None:
            framework = capabilities.framework
            limits = tuple(backend.limits()) if hasattr(backend, "limits") else ()
            sizes: Any = getattr(backend, "get_supported_kernel_block_size", tuple)()  # of paged families only
            served = {"block_sizes": tuple(map(str, sizes)), "features": _features(backend), "limits": limits}
            if judge:
                device = devices[framework]
                # `devices` has a reason in place of a device where a framework has none.
                reasons += [device] if isinstance(device, str) else capabilities.device_reasons(device)
    except Exception as error:  # third-party classes may raise anything; report it in the row
        reasons.append(f"broken: {type(error).__name__}: {error}")
        # Nothing of a broken class is shown: half of a record would look like a whole one.
        capabilities, served = None, {}
    return BackendRow(
        registry=registry,
        name=candidate.name,
        path=candidate.path,
        origin=origin,
        framework=framework,
        reasons=tuple(reasons),
        capabilities=capabilities,
        evidence=evidence.summary(registry, candidate.name),
        **served,
    )


def _beside(registry: str) -> list[Candidate]:
    """Candidates outside a registry's members: the backend of the selector's block-sparse branch."""
    return [blocksparse_candidate()] if registry == "attention" else []


def _features(backend: Any) -> tuple[str, ...]:
    """The features a backend serves, in the order of `Feature`."""
    served = backend.served_features() if hasattr(backend, "served_features") else backend.capabilities.features
    return tuple(feature.value for feature in Feature if feature in served)


def _framework_of_path(path: str) -> str:
    parts = path.split(".")
    return parts[1] if parts[0] == "attn" and len(parts) > 1 and parts[1] in FRAMEWORKS else ""


def _table_cells(registry: str, candidate: Candidate) -> list[str]:
    if not candidate.path:
        return [f"`{candidate.name}`", "a slot for a class of yours", *[""] * (len(_COLUMNS) - 2)]
    # Not judged: the table is the same on every machine that has both frameworks.
    row = _described(registry, candidate, "built-in", {}, judge=False)
    record = row.capabilities
    runs_on, sizes = [row.framework, *([] if row.built else [NOT_BUILT])], []
    if record is not None:
        runs_on += [", ".join(record.platforms)]
        runs_on += [f"needs {needs}"] if (needs := record.install or ", ".join(record.packages)) else []
        sizes += [", ".join(record.dtypes), f"head_size {', '.join(map(str, record.head_sizes))}"]
        sizes += [f"block_size {', '.join(row.block_sizes)}"] if row.block_sizes else []
        sizes += [f"kv cache {', '.join(record.kv_cache_dtypes)}"]
    lines = [runs_on, sizes, [", ".join([*row.features, *row.limits])], row.evidence.split("; ")]
    return [f"`{row.name}`", *("<br>".join(filter(None, line)) for line in lines)]
