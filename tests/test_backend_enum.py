"""The registry behind the three enums: members, overrides, custom backends, and the errors of invalid registrations."""

import asyncio
import copy
import enum
import importlib
import multiprocessing
import os
import pickle
import sys
import threading

import pytest

from attn import backend_enum, imports
from attn.backend_enum import BackendEnum, generation, registered
from attn.backends.mla.prefill.registry import (
    _MLA_PREFILL_OVERRIDES,
    MLAPrefillBackendEnum,
    register_mla_prefill_backend,
)
from attn.backends.registry import _OVERRIDES, AttentionBackendEnum, register_backend, registered_backend
from attn.diffusion.backends.registry import DiffusionAttentionBackendEnum, register_diffusion_backend
from attn.errors import AttnError, BackendLoadError

REGISTRARS = {
    AttentionBackendEnum: register_backend,
    MLAPrefillBackendEnum: register_mla_prefill_backend,
    DiffusionAttentionBackendEnum: register_diffusion_backend,
}
every_registry = pytest.mark.parametrize("registry", REGISTRARS, ids=lambda r: r.__name__)


class Mine:
    """A class that can be found by name."""

    class Inner:
        """So can this, with a colon."""


MINE = f"{__name__}.Mine"


# --- members -----------------------------------------------------------------------------------------------------


@every_registry
def test_every_member_is_distinct(registry):
    """vLLM's `TORCH_SDPA = ""` and `CUSTOM = ""` were one member."""
    enum.unique(registry)
    assert len(list(registry)) == len(registry.__members__) == len({m.value for m in registry})


def test_registering_custom_leaves_sdpa_alone():
    before = AttentionBackendEnum.TORCH_SDPA.get_path()
    register_backend(AttentionBackendEnum.CUSTOM, MINE)
    assert AttentionBackendEnum.TORCH_SDPA.get_path() == before
    assert AttentionBackendEnum.CUSTOM.get_path() == MINE
    assert not AttentionBackendEnum.TORCH_SDPA.is_overridden()


@every_registry
@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_members_travel_by_name(registry, protocol):
    member = registry.FLASH_ATTN
    data = pickle.dumps(member, protocol)
    assert b"FLASH_ATTN" in data and member.value.encode() not in data
    REGISTRARS[registry](member, MINE)
    assert pickle.loads(data) is member
    assert pickle.dumps(member, protocol) == data
    assert copy.copy(member) is member and copy.deepcopy({"a": [member]}) == {"a": [member]}


@every_registry
def test_membership_takes_names_and_members(registry):
    assert "FLASH_ATTN" in registry and registry.FLASH_ATTN in registry
    assert "NOPE" not in registry and None not in registry and 3 not in registry
    assert all(other.FLASH_ATTN not in registry for other in REGISTRARS if other is not registry)


@every_registry
@pytest.mark.parametrize("name", ["NOPE", "", "flash attn", " FLASH_ATTN", None, 3, ("a",)], ids=repr)
def test_unknown_names_list_what_there_is(registry, name):
    with pytest.raises(ValueError) as caught:
        registry[name]
    assert f"'{name}'" in str(caught.value)
    assert all(member in str(caught.value) for member in registry.__members__)


@every_registry
def test_lookup_by_value_is_the_enums_own(registry):
    assert registry(registry.FLASH_ATTN.value) is registry.FLASH_ATTN
    with pytest.raises(ValueError):
        registry("NOPE")


# --- paths and classes -------------------------------------------------------------------------------------------


@every_registry
def test_path_override_and_back(registry):
    member, default = registry.FLASH_ATTN, registry.FLASH_ATTN.value
    assert member.get_path() == default and not member.is_overridden()
    assert member.get_path(include_classname=False) == default.rpartition(".")[0]
    assert REGISTRARS[registry](member, MINE)(int) is int  # vLLM's no-op decorator
    assert member.get_path() == MINE and member.is_overridden() and member.get_class() is Mine
    assert member.value == default
    member.clear_override()
    assert member.get_path() == default and not member.is_overridden()
    member.clear_override()


@every_registry
@pytest.mark.parametrize("name", ["CUSTOM", "SOMEONE_ELSES"])
def test_decorator_returns_the_class(registry, name):
    target = registry.CUSTOM if name == "CUSTOM" else name

    @REGISTRARS[registry](target)
    class Local:
        pass

    assert isinstance(Local, type)
    assert registry[name].get_class() is Local
    assert REGISTRARS[registry](target)(Mine) is Mine
    assert registry[name].get_path() == MINE and registry[name].get_class() is Mine


def test_nested_classes_are_found_by_a_colon():
    register_backend("NESTED", Mine.Inner)
    assert AttentionBackendEnum["NESTED"].get_path() == f"{__name__}:Mine.Inner"
    assert AttentionBackendEnum["NESTED"].get_path(include_classname=False) == __name__
    assert imports.resolve_obj_by_qualname(f"{__name__}:Mine.Inner") is Mine.Inner


def test_two_classes_of_one_function_stay_two():
    def make():
        class Same:
            pass

        return Same

    first, second = make(), make()
    register_backend("FIRST", first)
    register_backend("SECOND", second)
    assert AttentionBackendEnum["FIRST"].get_class() is first
    assert AttentionBackendEnum["SECOND"].get_class() is second
    with registered_backend("FIRST", second):
        assert AttentionBackendEnum["FIRST"].get_class() is second
    assert AttentionBackendEnum["FIRST"].get_class() is first


def test_a_class_that_no_module_holds_is_kept_as_an_object():
    made = type("Made", (), {})
    register_backend("MADE", made)
    assert AttentionBackendEnum["MADE"].get_class() is made


def test_the_override_tables_are_the_seeds_names():
    register_backend(AttentionBackendEnum.FLASH_ATTN, MINE)
    assert _OVERRIDES == {AttentionBackendEnum.FLASH_ATTN: MINE}
    _OVERRIDES[AttentionBackendEnum.FLASH_ATTN] = f"{__name__}:Mine.Inner"
    assert AttentionBackendEnum.FLASH_ATTN.get_class() is Mine.Inner
    _OVERRIDES.clear()
    assert not AttentionBackendEnum.FLASH_ATTN.is_overridden()
    register_mla_prefill_backend("X", MINE)
    assert list(_MLA_PREFILL_OVERRIDES) == [MLAPrefillBackendEnum["X"]]


def test_a_path_put_over_a_registered_object_wins():
    class Local:
        pass

    register_backend(AttentionBackendEnum.CUSTOM, Local)
    register_backend(AttentionBackendEnum.CUSTOM, MINE)
    assert AttentionBackendEnum.CUSTOM.get_class() is Mine


# --- custom backends ---------------------------------------------------------------------------------------------


@every_registry
def test_many_custom_names_live_beside_each_other(registry):
    for number in range(5):
        REGISTRARS[registry](f"MINE_{number}", MINE)
    assert registry.names()[-5:] == [f"MINE_{number}" for number in range(5)]
    custom = registry["MINE_3"]
    assert isinstance(custom, registry) and custom.name == "MINE_3" and custom is registry["MINE_3"]
    assert custom in registry and "MINE_3" in registry
    assert custom != registry["MINE_4"] and len({custom, registry["MINE_4"], custom}) == 2
    assert pickle.loads(pickle.dumps(custom)) is custom and copy.deepcopy(custom) is custom
    assert "MINE_3" in repr(custom) and str(custom) == f"{registry.__name__}.MINE_3"
    assert "MINE_3" not in registry.__members__ and list(registry)[-1] is registry.CUSTOM


@every_registry
def test_a_cleared_custom_name_is_unknown_again(registry):
    REGISTRARS[registry]("GONE", MINE)
    member = registry["GONE"]
    member.clear_override()
    assert "GONE" not in registry and "GONE" not in registry.names()
    with pytest.raises(ValueError, match="Unknown .*'GONE'"):
        registry["GONE"]
    with pytest.raises(ValueError, match="GONE must be registered before use"):
        member.get_path()
    REGISTRARS[registry]("GONE", MINE)
    assert registry["GONE"] is member


@every_registry
def test_a_pickled_custom_name_that_is_not_registered_is_an_error(registry):
    REGISTRARS[registry]("ELSEWHERE", MINE)
    data = pickle.dumps(registry["ELSEWHERE"])
    registry["ELSEWHERE"].clear_override()
    with pytest.raises(ValueError, match="'ELSEWHERE'"):
        pickle.loads(data)


@every_registry
@pytest.mark.parametrize("name", ["", "1ST", "has space", "dash-ed", "dot.ted", "_underscored", "ümlaut", "A\n"])
def test_malformed_names_are_refused(registry, name):
    with pytest.raises(ValueError, match="must be letters, digits and underscores"):
        REGISTRARS[registry](name, MINE)
    assert name not in registry


@every_registry
def test_a_builtin_name_needs_override(registry):
    register = REGISTRARS[registry]
    with pytest.raises(ValueError, match=f"pass {registry.__name__}.FLASH_ATTN, or override=True"):
        register("FLASH_ATTN", MINE)
    assert not registry.FLASH_ATTN.is_overridden()
    register("FLASH_ATTN", MINE, override=True)
    assert registry.FLASH_ATTN.get_path() == MINE


@pytest.mark.parametrize(
    "path",
    ["", "NoDots", "a.b.", ".a.b", "a..b", "a.b c", "1a.b", "a:b:c", "a/b.py", "mod.f.<locals>.C", "a.b\n"],
)
@every_registry
def test_malformed_paths_are_refused(registry, path):
    with pytest.raises(ValueError, match="is not of the form"):
        REGISTRARS[registry](registry.CUSTOM, path)
    assert not registry.CUSTOM.is_overridden()


def test_a_local_class_by_path_must_be_passed_itself():
    with pytest.raises(ValueError, match="pass the class itself"):
        register_backend("X", "mod.f.<locals>.C")


@every_registry
@pytest.mark.parametrize("backend", [None, 3, int, b"X"], ids=repr)
def test_what_is_neither_member_nor_name_is_refused(registry, backend):
    for target in (MINE, None, Mine):
        with pytest.raises(TypeError, match=f"must be a {registry.__name__} member or a name"):
            REGISTRARS[registry](backend, target)


@every_registry
def test_a_member_of_another_registry_is_refused(registry):
    other = next(r for r in REGISTRARS if r is not registry)
    with pytest.raises(TypeError, match=f"must be a {registry.__name__} member"):
        REGISTRARS[registry](other.FLASH_ATTN, MINE)


@every_registry
@pytest.mark.parametrize("thing", [3, lambda: None, "text", Mine()], ids=["int", "function", "str", "instance"])
def test_the_decorator_takes_classes_only(registry, thing):
    with pytest.raises(TypeError, match="expected a class"):
        REGISTRARS[registry](registry.CUSTOM)(thing)
    assert not registry.CUSTOM.is_overridden()


@pytest.mark.parametrize("target", [3, lambda: None], ids=["int", "function"])
def test_a_target_that_is_neither_path_nor_class_is_refused(target):
    with pytest.raises(ValueError, match="class path"):
        register_backend("X", target)
    assert "X" not in AttentionBackendEnum


def test_registration_is_idempotent():
    register_backend("AGAIN", Mine)
    register_backend("AGAIN", Mine)
    assert AttentionBackendEnum.names().count("AGAIN") == 1


# --- the context-manager form ------------------------------------------------------------------------------------


@every_registry
@pytest.mark.parametrize("name", ["FLASH_ATTN", "CUSTOM", "NEW"])
def test_context_manager_restores(registry, name):
    with registered(registry, name, Mine) as member:
        assert registry[name] is member and member.get_class() is Mine
    assert name not in registry or not registry[name].is_overridden()


def test_context_manager_restores_what_stood_before_also_after_an_error():
    register_backend(AttentionBackendEnum.FLASH_ATTN, MINE)
    with (
        pytest.raises(RuntimeError, match="inside"),
        registered_backend(AttentionBackendEnum.FLASH_ATTN, "other.mod.C"),
    ):
        with registered_backend(AttentionBackendEnum.FLASH_ATTN, Mine.Inner):
            assert AttentionBackendEnum.FLASH_ATTN.get_class() is Mine.Inner
        assert AttentionBackendEnum.FLASH_ATTN.get_path() == "other.mod.C"
        raise RuntimeError("inside")
    assert AttentionBackendEnum.FLASH_ATTN.get_path() == MINE


def test_context_manager_with_a_bad_target_changes_nothing():
    for target, error in (("<bad>", ValueError), (3, ValueError)):
        with pytest.raises(error), registered_backend("FRESH", target):
            raise AssertionError("must not be entered")
    assert "FRESH" not in AttentionBackendEnum


# --- generation --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "change",
    [
        lambda: register_backend("G", MINE),
        lambda: register_mla_prefill_backend("G", Mine),
        lambda: register_diffusion_backend(DiffusionAttentionBackendEnum.CUSTOM)(Mine),
        lambda: AttentionBackendEnum.FLASH_ATTN.clear_override(),
        lambda: _OVERRIDES.update({AttentionBackendEnum.PALLAS: MINE}),
        lambda: _OVERRIDES.setdefault(AttentionBackendEnum.PALLAS, MINE),
        lambda: _OVERRIDES.__ior__({AttentionBackendEnum.PALLAS: MINE}),
        lambda: _OVERRIDES.pop(AttentionBackendEnum.PALLAS, None),
        lambda: _OVERRIDES.clear(),
    ],
    ids=["path", "class", "decorator", "clear", "update", "setdefault", "ior", "pop", "clear-all"],
)
def test_every_change_moves_the_generation(change):
    before = generation()
    change()
    assert generation() != before
    assert generation() == generation()


def test_no_generation_comes_twice_under_threads():
    """A number seen again would let an answer from before a change be served after it."""
    seen = [set() for _ in range(8)]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)

    def change(mine, name):
        for _ in range(300):
            register_backend(name, MINE)
            AttentionBackendEnum[name].clear_override()
            mine.add(generation())

    try:
        threads = [threading.Thread(target=change, args=(mine, f"T{i}")) for i, mine in enumerate(seen)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    final = generation()
    register_backend("AFTER", MINE)
    assert generation() > max(final, *(max(mine) for mine in seen))


def test_asyncio_tasks_register_side_by_side():
    async def one(number):
        with registered_backend(f"TASK_{number}", Mine) as member:
            await asyncio.sleep(0)
            assert AttentionBackendEnum[f"TASK_{number}"] is member

    async def everyone():
        await asyncio.gather(*map(one, range(5)))

    asyncio.run(everyone())
    assert not [name for name in AttentionBackendEnum.names() if name.startswith("TASK_")]


# --- resolution --------------------------------------------------------------------------------------------------

BROKEN = {
    "ImportError": "raise ImportError('libcudart.so.12: cannot open shared object file')",
    "OSError": "raise OSError('undefined symbol')",
    "RuntimeError": "raise RuntimeError('no driver')",
    "SystemExit": "raise SystemExit(3)",
    "BaseException": "raise BaseException('odd')",
    "SyntaxError": "def broken(:",
    "AttributeError": "",
}


@pytest.fixture
def module_of(tmp_path, monkeypatch):
    """`module_of(source)`: the name of a module of that source, importable for the length of the test."""
    monkeypatch.syspath_prepend(str(tmp_path))
    made = []

    def write(source, name="vendor_module"):
        (tmp_path / f"{name}.py").write_text(source)
        importlib.invalidate_caches()
        made.append(name)
        return name

    yield write
    for name in made:
        sys.modules.pop(name, None)


@pytest.mark.parametrize("kind", BROKEN)
def test_what_cannot_be_loaded_is_a_load_error_with_its_cause(kind, module_of):
    path = f"{module_of(BROKEN[kind])}.Backend"
    register_backend("BROKEN", path)
    for _ in range(2):  # a failure is not remembered as anything else
        with pytest.raises(BackendLoadError) as caught:
            AttentionBackendEnum["BROKEN"].get_class()
        assert type(caught.value.__cause__).__name__ == kind
        assert path in str(caught.value) and kind in str(caught.value)
        assert isinstance(caught.value, ImportError) and isinstance(caught.value, AttnError)
    candidate = AttentionBackendEnum["BROKEN"].candidate()
    assert candidate.backend is None and kind in candidate.problem


def test_a_module_whose_lazy_attribute_raises_is_a_load_error(module_of):
    path = module_of("def __getattr__(name):\n    raise OSError('no such library')") + ".Backend"
    with pytest.raises(BackendLoadError, match="OSError: no such library"):
        imports.resolve_obj_by_qualname(path)


@pytest.mark.parametrize("kind", ["KeyboardInterrupt", "GeneratorExit"])
def test_an_interrupt_while_loading_is_no_load_error(kind, module_of):
    path = module_of(f"raise {kind}") + ".Backend"
    with pytest.raises((KeyboardInterrupt, GeneratorExit)):
        imports.resolve_obj_by_qualname(path)


def test_a_failure_does_not_poison_a_later_try(module_of):
    register_backend("MENDED", module_of("raise ImportError('not yet')") + ".Backend")
    with pytest.raises(BackendLoadError):
        AttentionBackendEnum["MENDED"].get_class()
    module_of("class Backend:\n    mended = True  # longer than the source before it")
    assert AttentionBackendEnum["MENDED"].get_class().mended


def test_what_is_no_class_is_a_problem_in_words(module_of):
    register_backend("NUMBER", module_of("Backend = 3") + ".Backend")
    assert "is not a class but 3" in AttentionBackendEnum["NUMBER"].candidate().problem


def test_an_unregistered_slot_is_a_problem_in_words():
    assert "CUSTOM must be registered before use" in AttentionBackendEnum.CUSTOM.candidate().problem


def test_a_path_of_ours_without_a_module_is_not_built_yet():
    register_backend("LATER", "attn.torch.backends.of_next_year.Backend")
    register_backend("DEEPER", "attn.torch.backends.of.next.year.Backend")
    register_backend("FLAT", "attn.Backend")
    assert AttentionBackendEnum["LATER"].candidate().problem == "not built yet: attn.torch.backends.of_next_year"
    assert AttentionBackendEnum["DEEPER"].candidate().problem.startswith("not built yet: ")
    assert "has no attribute 'Backend'" in AttentionBackendEnum["FLAT"].candidate().problem


def test_a_missing_framework_is_an_error_with_the_install_command(monkeypatch):
    monkeypatch.setattr(backend_enum, "installed", lambda module: module != "jax")
    assert AttentionBackendEnum.PALLAS.candidate().problem == "jax is not installed (pip install 'jax>=0.10.1' 'flax>=0.12.8')"


@every_registry
def test_every_path_exists_or_is_reported_as_not_built_yet(registry):
    """No member's path may be misspelt: its module is there, with that class, or is announced as still to come."""
    problems = {member.name: member.candidate().problem for member in registry if member is not registry.CUSTOM}
    assert {n: p for n, p in problems.items() if p and not p.startswith("not built yet: ")} == {}


# --- processes ---------------------------------------------------------------------------------------------------


def in_child(queue, data):
    member = pickle.loads(data)
    with registered_backend("IN_CHILD", Mine):
        queue.put((member.name, member is AttentionBackendEnum.CPU_ATTN, "IN_CHILD" in AttentionBackendEnum))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning", "ignore:.*fork.*:RuntimeWarning")
def test_a_forked_child_registers_though_a_thread_held_the_lock():
    context = multiprocessing.get_context("fork")
    queue, taken, release = context.Queue(), threading.Event(), threading.Event()

    def hold():
        with backend_enum._lock():
            taken.set()
            release.wait()

    holder = threading.Thread(target=hold)
    holder.start()
    taken.wait()
    child = context.Process(target=in_child, args=(queue, pickle.dumps(AttentionBackendEnum.CPU_ATTN)))
    child.start()
    try:
        assert queue.get(timeout=20) == ("CPU_ATTN", True, True)
    finally:
        release.set()
        holder.join()
        child.join(20)
        if child.is_alive():
            child.kill()


def test_the_base_states_what_a_registry_is():
    class Small(BackendEnum, label="toy", unset="{name} is unset"):
        ONE = "a.b.One"
        CUSTOM = None

    with pytest.raises(ValueError, match="Unknown toy: 'TWO'. Valid options are: ONE, CUSTOM"):
        Small["TWO"]
    with pytest.raises(ValueError, match="CUSTOM is unset"):
        Small.CUSTOM.get_path()
    with pytest.raises(TypeError):
        type(Small)("Unnamed", (BackendEnum,), type(Small).__prepare__("Unnamed", (BackendEnum,)))


@pytest.mark.parametrize(
    ("wrong", "meant"), [("torch_sdp", "TORCH_SDPA"), ("FLASH_ATN", "FLASH_ATTN"), ("Min", "MINE"), ("NOPE", None)]
)
def test_a_name_that_is_nearly_right_is_suggested(wrong, meant):
    register_backend("MINE", "package.module.Mine")
    with pytest.raises(ValueError) as caught:
        AttentionBackendEnum[wrong]
    hint = f" Did you mean {meant}?" if meant else ""
    options = ", ".join(AttentionBackendEnum.names())
    assert str(caught.value) == f"Unknown attention backend: '{wrong}'.{hint} Valid options are: {options}"


def test_a_name_is_found_in_any_case():
    register_backend("Mine", "package.module.Mine")
    for name, known in (("torch_sdpa", "TORCH_SDPA"), ("Torch_Sdpa", "TORCH_SDPA"), ("mine", "Mine"), ("MINE", "Mine")):
        assert name in AttentionBackendEnum and AttentionBackendEnum[name].name == known
    register_backend("MINE", "package.module.Other")
    assert AttentionBackendEnum["MINE"].get_path() == "package.module.Other", "of two, the one of the same case"
    AttentionBackendEnum["Mine"].clear_override()
    assert AttentionBackendEnum["Mine"].name == "MINE", "one that is no longer registered is not found"


def test_a_path_replaces_a_class_of_the_same_path(monkeypatch):
    """A module that is edited and reloaded has another class under the path that the first one was registered with."""
    registered = type("Reloaded", (), {"__module__": __name__})
    register_backend("RELOADED", registered)
    reloaded = type("Reloaded", (), {"__module__": __name__})
    monkeypatch.setitem(globals(), "Reloaded", reloaded)
    assert AttentionBackendEnum["RELOADED"].get_class() is registered
    register_backend("RELOADED", f"{__name__}.Reloaded")
    assert AttentionBackendEnum["RELOADED"].get_class() is reloaded
