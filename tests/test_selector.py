"""Which backend is selected: the candidates, their order, when a change takes effect, and the errors."""

import asyncio
import contextvars
import importlib
import logging
import multiprocessing
import os
import pickle
import re
import sys
import threading

import numpy as np
import pytest

from attn import selector
from attn.backends import registry
from attn.backends.no_attention import NoAttentionBackend
from attn.backends.placeholder_attn import PlaceholderAttentionBackend, PlaceholderAttentionMetadataBuilder
from attn.backends.registry import AttentionBackendEnum, register_backend, registered_backend
from attn.capabilities import Candidate, Device, Feature
from attn.errors import AttnError, BackendLoadError, DTypeError, UnsupportedError
from attn.selection import platforms
from attn.selector import (
    get_attn_backend,
    global_force_attn_backend,
    global_force_attn_backend_context_manager,
    make_request,
    select,
)


@pytest.fixture
def three(platform, make_backend):
    """A priority list of three registered backends that all serve."""
    platform.names = ("ONE", "TWO", "THREE")
    for name in platform.names:
        register_backend(name, make_backend(name))
    return platform


def pick(dtype="float32", **changes):
    arguments = {"head_size": 64, "dtype": dtype, "kv_cache_dtype": None, "block_size": 16, "is_attention_free": False}
    return get_attn_backend(**{**arguments, **changes}).get_name()


# --- who is asked ------------------------------------------------------------------------------------------------


def test_the_first_on_the_list(three):
    assert pick() == "ONE" and select(make_request(64, "float32")).source == "priority"
    three.names = ("THREE", "ONE")
    selector._cache.clear()
    assert pick() == "THREE"


@pytest.mark.parametrize(
    ("force", "argument", "variable", "vllm", "winner", "source"),
    [
        (None, None, None, None, "ONE", "priority"),
        (None, None, None, "TWO", "TWO", "VLLM_ATTENTION_BACKEND"),
        (None, None, "THREE", "TWO", "THREE", "ATTN_BACKEND"),
        (None, None, "", "TWO", "TWO", "VLLM_ATTENTION_BACKEND"),
        (None, None, "", "", "ONE", "priority"),
        (None, "TWO", "THREE", "THREE", "TWO", "argument"),
        ("THREE", "TWO", "TWO", "TWO", "THREE", "context"),
        ("THREE", None, "TWO", None, "THREE", "context"),
    ],
)
def test_precedence(force, argument, variable, vllm, winner, source, three, monkeypatch):
    for name, value in (("ATTN_BACKEND", variable), ("VLLM_ATTENTION_BACKEND", vllm)):
        if value is not None:
            monkeypatch.setenv(name, value)
    global_force_attn_backend(force)
    selection = select(make_request(64, "float32", None, 16), backend=argument)
    assert (selection.name, selection.source) == (winner, source)
    assert len(selection.trace) == (3 if source == "priority" else 1)
    if argument is None:
        assert pick() == winner


def test_the_platforms_entry_point_of_vllm(three):
    ask = lambda backend: three.get_attn_backend_cls(backend, 64, "float32", None, 16, True, False)  # noqa: E731
    assert ask(None) == AttentionBackendEnum["ONE"].get_path()
    assert ask(AttentionBackendEnum["TWO"]) == AttentionBackendEnum["TWO"].get_path()
    with pytest.raises(UnsupportedError, match="mla not supported"):
        three.get_attn_backend_cls(None, 64, "float32", None, 16, True, True)
    assert three.device_name == "cpu"


@pytest.mark.parametrize("variable", ["ATTN_BACKEND", "VLLM_ATTENTION_BACKEND", "ATTN_DISABLE"])
def test_an_unknown_name_in_the_environment_is_an_error_with_the_options(variable, three, monkeypatch):
    monkeypatch.setenv(variable, "TWOO")
    with pytest.raises(ValueError) as caught:
        pick()
    kind = "backend" if variable == "ATTN_DISABLE" else "attention backend"
    said = f"{variable}=TWOO: Unknown {kind}: 'TWOO'. Did you mean TWO? Valid options are: FLASH_ATTN"
    assert said in str(caught.value)
    assert "TWO, THREE" in str(caught.value)


@pytest.mark.parametrize(
    ("backend", "error", "words"),
    [("NOPE", ValueError, "Unknown attention backend: 'NOPE'"), (3, TypeError, "member or a name, not 3")],
)
def test_an_unknown_name_as_argument_or_force(backend, error, words, three):
    for ask in (
        lambda: select(make_request(64, "float32"), backend=backend),
        lambda: global_force_attn_backend(backend),
        lambda: global_force_attn_backend_context_manager(backend).__enter__(),
        lambda: select(make_request(64, "float32"), disable=[backend]),
    ):
        with pytest.raises(error, match=words):
            ask()
    assert pick() == "ONE"


def test_attn_disable_keeps_names_out_of_automatic_choice_only(three, monkeypatch):
    monkeypatch.setenv("ATTN_DISABLE", "ONE, THREE")
    assert pick() == "TWO"
    selection = select(make_request(64, "float32"), disable=[AttentionBackendEnum["TWO"]])
    assert selection.winner is None
    assert [str(v) for v in selection.trace] == [
        "disabled by ATTN_DISABLE",
        "disabled by the caller",
        "disabled by ATTN_DISABLE",
    ]
    assert select(make_request(64, "float32"), backend="ONE").name == "ONE"
    monkeypatch.setenv("ATTN_BACKEND", "THREE")
    assert pick() == "THREE"
    monkeypatch.setenv("ATTN_DISABLE", " ,")
    monkeypatch.delenv("ATTN_BACKEND")
    assert pick() == "ONE"


# --- a backend asked for by name is obeyed or refused ------------------------------------------------------------


@pytest.mark.parametrize("way", ["force", "environment", "argument"])
def test_an_explicit_choice_never_falls_back(way, three, make_backend, monkeypatch):
    register_backend("HALF_ONLY", make_backend("HALF_ONLY", dtypes=("float16",)))
    with asked_by(way, "HALF_ONLY", monkeypatch) as ask, pytest.raises(UnsupportedError) as caught:
        ask()
    assert caught.value.reasons == ("HALF_ONLY: dtype=float32 (supports float16)",)
    assert "ONE" not in str(caught.value)


@pytest.mark.parametrize("way", ["force", "environment", "argument"])
@pytest.mark.parametrize(
    ("source", "cause"), [("raise OSError('no such library')", OSError), ("raise SystemExit(2)", SystemExit)]
)
def test_an_explicit_choice_that_cannot_be_loaded_raises_with_its_cause(way, source, cause, three, monkeypatch, tmp_path):
    (tmp_path / "broken_vendor.py").write_text(source)
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.invalidate_caches()
    register_backend("BROKEN", "broken_vendor.Backend")
    three.names = ("BROKEN", "ONE")
    assert pick() == "ONE"
    assert f"{cause.__name__}: " in str(select(make_request(64, "float32")).trace[0])
    with asked_by(way, "BROKEN", monkeypatch) as ask, pytest.raises(BackendLoadError, match="broken_vendor") as caught:
        ask()
    chain, error = [], caught.value
    while error is not None:
        chain.append(type(error))
        error = error.__cause__
    assert cause in chain


def asked_by(way, name, monkeypatch):
    """A context in which `ask()` selects `name` by one of the three ways."""
    import contextlib

    @contextlib.contextmanager
    def context():
        if way == "force":
            with global_force_attn_backend_context_manager(name):
                yield pick
        elif way == "environment":
            monkeypatch.setenv("ATTN_BACKEND", name)
            yield pick
        else:
            yield lambda: select(make_request(64, "float32", None, 16), backend=name).require()

    return context()


def test_not_built_yet_is_a_reason(three):
    register_backend("FUTURE", "attn.torch.backends.of_next_year.Backend")
    with pytest.raises(UnsupportedError, match="FUTURE  not built yet: attn.torch.backends.of_next_year"):
        select(make_request(64, "float32"), backend="FUTURE").require()


def test_missing_packages_are_reasons(three, make_backend):
    register_backend("VENDOR", make_backend("VENDOR", packages=("no_such_vendor",), install="no-such-vendor"))
    three.names = ("VENDOR", "ONE")
    assert pick() == "ONE"
    with pytest.raises(UnsupportedError, match=r"no_such_vendor is not installed \(pip install no-such-vendor\)"):
        select(make_request(64, "float32"), backend="VENDOR").require()


def test_without_a_backend_every_candidate_is_listed_with_every_reason(three, make_backend):
    register_backend("THREE", make_backend("THREE", head_sizes=(128,), dtypes=("float16",)), override=True)
    with pytest.raises(UnsupportedError) as caught:
        pick(features={Feature.SINKS, "alibi"})
    message = str(caught.value)
    assert message.splitlines()[0] == "Invalid attention backend for test CPU"
    assert "no backend for head_size=64 dtype=float32 block_size=16 features={alibi, sinks} on test CPU" in message
    assert "ONE    alibi not supported; sinks not supported" in message
    assert "THREE  head_size=64 (supports 128); dtype=float32 (supports float16); alibi not" in message
    assert isinstance(caught.value, ValueError) and len(caught.value.reasons) == 3


# --- when a change takes effect ----------------------------------------------------------------------------------


def test_a_second_call_is_cached(three):
    assert pick() == "ONE"
    asked = three.asked
    assert pick() == "ONE" and three.asked == asked


def test_the_environment_counts_at_the_next_call(three, monkeypatch):
    assert pick() == "ONE"
    for variable, value, expected in [
        ("ATTN_BACKEND", "TWO", "TWO"),
        ("ATTN_BACKEND", "THREE", "THREE"),
        ("ATTN_BACKEND", None, "ONE"),
        ("VLLM_ATTENTION_BACKEND", "TWO", "TWO"),
        ("VLLM_ATTENTION_BACKEND", None, "ONE"),
        ("ATTN_DISABLE", "ONE", "TWO"),
        ("ATTN_DISABLE", None, "ONE"),
    ]:
        monkeypatch.delenv(variable, raising=False) if value is None else monkeypatch.setenv(variable, value)
        assert pick() == pick() == expected


def test_a_registration_counts_at_the_next_call(three, make_backend):
    assert pick() == "ONE"
    with registered_backend("ONE", make_backend("ELSE")):
        assert pick() == "ELSE"
        AttentionBackendEnum["ONE"].clear_override()
        with pytest.raises(ValueError, match="Unknown attention backend: 'ONE'"):
            pick()
    assert pick() == "ONE"
    register_backend("FIRST", make_backend("FIRST", priority=1))
    assert pick() == "FIRST"
    AttentionBackendEnum["FIRST"].clear_override()
    assert pick() == "ONE"


def test_an_environment_that_changes_while_selecting_is_not_remembered_under_the_old_one(three, monkeypatch):
    original = three.priorities

    def meddling(request, device):
        monkeypatch.setenv("ATTN_DISABLE", "ONE")
        return original(request, device)

    monkeypatch.setattr(three, "priorities", meddling)
    pick()
    monkeypatch.setattr(three, "priorities", original)
    monkeypatch.delenv("ATTN_DISABLE")
    asked = three.asked
    assert pick() == "ONE" and three.asked == asked + 1


def test_a_failure_is_not_remembered(three, make_backend):
    three.names = ()
    for _ in range(2):
        with pytest.raises(UnsupportedError):
            pick(head_size=80, block_size=17, dtype="float64")
    three.names = ("ONE",)
    assert pick() == "ONE"


def test_the_cache_does_not_grow_forever(three, monkeypatch):
    monkeypatch.setattr(selector, "_CACHE_LIMIT", 8)
    for head_size in range(1, 30):
        pick(head_size=head_size)
    assert len(selector._cache) <= 8


@pytest.mark.parametrize("wrong", [True, 1.0, "1", 0, -1, [1]], ids=repr)
@pytest.mark.parametrize("field", ["head_size", "block_size"])
def test_true_one_and_one_point_zero_are_distinguished(field, wrong, three):
    assert pick(head_size=1, block_size=1) == "ONE"
    with pytest.raises(ValueError, match=rf"{field}=.* must be a positive int"):
        pick(**{"head_size": 1, "block_size": 1, field: wrong})


def test_numpy_integers_are_integers(three):
    assert pick(head_size=np.int64(64), block_size=np.int32(16)) == "ONE"
    assert make_request(np.int64(64), "float32").head_size.__class__ is int


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"dtype": "float12"}, DTypeError, "dtype 'float12' is unknown; known: "),
        ({"dtype": None}, DTypeError, "dtype None is unknown"),
        ({"dtype": []}, DTypeError, r"dtype \[\] is unknown"),
        ({"kv_cache_dtype": "int3"}, ValueError, "kv_cache_dtype='int3' is unknown; known: auto"),
        ({"kv_cache_dtype": ""}, ValueError, "kv_cache_dtype='' is unknown; known: auto"),
        ({"kv_cache_dtype": ["fp8"]}, ValueError, "kv_cache_dtype=.* is unknown; known: auto"),
        ({"features": ["wings"]}, ValueError, "feature 'wings' is unknown; known: non_causal"),
        ({"attn_type": "sideways"}, ValueError, "attn_type='sideways' is unknown; known: decoder"),
        ({"num_heads": 6, "num_kv_heads": 4}, ValueError, "num_heads=6 is not a multiple of num_kv_heads=4"),
        ({"num_heads": 2.5}, ValueError, "num_heads=2.5 must be a positive int"),
        ({"features": "lse"}, ValueError, r"features='lse' must be a list of names, such as \['lse'\]"),
        ({"features": Feature.LSE}, ValueError, r"features='lse' must be a list of names, such as \['lse'\]"),
        ({"features": None}, ValueError, "features=None must be a list of names"),
        ({"colour": "red"}, TypeError, "colour"),
    ],
)
def test_malformed_arguments(changes, error, words, three):
    with pytest.raises(error, match=words):
        pick(**changes)


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"disable": "TWO"}, ValueError, r"disable='TWO' must be a list of names, such as \['TWO'\]"),
        ({"device": "cuda"}, TypeError, r"device='cuda' must be an attn.Device, such as Device\('torch', 'cuda'\)"),
    ],
)
def test_malformed_arguments_of_select(changes, error, words, three):
    with pytest.raises(error, match=words):
        select(make_request(64, "float32"), **changes)


# --- the force is a context ----------------------------------------------------------------------------------------


def test_force_and_release(three):
    global_force_attn_backend("TWO")
    assert pick() == "TWO"
    global_force_attn_backend(AttentionBackendEnum["THREE"])
    assert pick() == "THREE"
    global_force_attn_backend(None)
    assert pick() == "ONE"


def test_the_context_manager_nests_and_restores_also_after_an_error(three):
    with global_force_attn_backend_context_manager("TWO"):
        with pytest.raises(RuntimeError, match="inside"), global_force_attn_backend_context_manager("THREE"):
            assert pick() == "THREE"
            raise RuntimeError("inside")
        assert pick() == "TWO"
    assert pick() == "ONE" and selector.get_global_forced_attn_backend() is None


def test_an_unknown_name_leaves_the_force_as_it_was(three):
    with global_force_attn_backend_context_manager("TWO"):
        with pytest.raises(ValueError), global_force_attn_backend_context_manager("NOPE"):
            raise AssertionError("must not be entered")
        assert pick() == "TWO"


def test_the_force_stays_in_its_thread(three):
    seen = {}

    def other():
        seen["start"] = pick()
        with global_force_attn_backend_context_manager("THREE"):
            seen["inside"] = pick()

    with global_force_attn_backend_context_manager("TWO"):
        thread = threading.Thread(target=contextvars.Context().run, args=(other,))
        thread.start()
        thread.join()
        assert pick() == "TWO"
    assert seen == {"start": "ONE", "inside": "THREE"}


def test_the_force_stays_in_its_task(three):
    async def task(name):
        with global_force_attn_backend_context_manager(name):
            await asyncio.sleep(0)
            inside = pick()
            await asyncio.sleep(0)
        return inside, pick()

    async def everyone():
        return await asyncio.gather(*(task(name) for name in three.names))

    assert asyncio.run(everyone()) == [("ONE", "ONE"), ("TWO", "ONE"), ("THREE", "ONE")]


def test_a_task_inherits_the_force_it_was_started_under(three):
    async def main():
        with global_force_attn_backend_context_manager("TWO"):
            started = asyncio.ensure_future(asyncio.to_thread(pick))
        return await started, pick()

    assert asyncio.run(main()) == ("TWO", "ONE")


# --- a backend per kind of layer ---------------------------------------------------------------------------------


@pytest.fixture
def windowed(platform, make_backend):
    """A priority list of three registered backends that support windows."""
    platform.names = ("ONE", "TWO", "THREE")
    for name in platform.names:
        register_backend(name, make_backend(name, features=("sliding_window",)))
    return platform


def sliding(**changes):
    return make_request(64, "float32", None, 16, features=["sliding_window"], **changes)


@pytest.mark.parametrize(
    ("force", "argument", "mapping", "per_kind", "variable", "winner", "source"),
    [
        (None, None, {"full": "TWO"}, None, None, "ONE", "priority"),
        (None, None, {"full": "TWO"}, None, "THREE", "THREE", "ATTN_BACKEND"),
        (None, None, {"full": "TWO"}, " sliding = THREE ,", "ONE", "THREE", "ATTN_BACKEND_PER_KIND['sliding']"),
        (None, None, {"sliding": "TWO"}, "sliding=THREE", "THREE", "TWO", "backend_per_kind['sliding']"),
        (None, "THREE", {"sliding": "TWO"}, None, None, "THREE", "argument"),
        ("THREE", None, {"sliding": "TWO"}, "sliding=TWO", None, "THREE", "context"),
        (None, None, None, "full=TWO,sliding=THREE", None, "THREE", "ATTN_BACKEND_PER_KIND['sliding']"),
    ],
)
def test_precedence_of_a_backend_per_kind(force, argument, mapping, per_kind, variable, winner, source, windowed, monkeypatch):
    for name, value in (("ATTN_BACKEND", variable), ("ATTN_BACKEND_PER_KIND", per_kind)):
        if value is not None:
            monkeypatch.setenv(name, value)
    global_force_attn_backend(force)
    selector.backend_per_kind(mapping)
    selection = select(sliding(), backend=argument)
    assert (selection.name, selection.source) == (winner, source)
    assert len(selection.trace) == (3 if source == "priority" else 1)
    if source != "priority":
        assert f"requested by {source}" in str(selection)


def test_a_backend_per_kind_counts_at_the_next_call(windowed, monkeypatch):
    assert pick() == "ONE"
    with selector.backend_per_kind_context_manager({"full": "TWO"}):
        assert (pick(), pick(features=["sliding_window"])) == ("TWO", "ONE")
        with pytest.raises(ValueError), selector.backend_per_kind_context_manager({"full": "NOPE"}):
            raise AssertionError("must not be entered")
        assert pick() == "TWO"
    assert pick() == "ONE"
    monkeypatch.setenv("ATTN_BACKEND_PER_KIND", "full=THREE")
    assert pick() == "THREE"


def test_a_backend_per_kind_that_cannot_serve_is_refused(three, make_backend):
    register_backend("NO_WINDOWS", make_backend("NO_WINDOWS", features=()))
    selector.backend_per_kind({"full": "NO_WINDOWS", "sliding": "NO_WINDOWS"})
    assert pick() == "NO_WINDOWS"
    with pytest.raises(UnsupportedError, match=r"(?s)requested by backend_per_kind\['sliding'\].*sliding_window not supported"):
        pick(features=["sliding_window"])


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("full=TWOO", r"ATTN_BACKEND_PER_KIND\['full'\]=TWOO: Unknown attention backend: 'TWOO'. Did you mean TWO?"),
        ("slidng=TWO", "ATTN_BACKEND_PER_KIND: Unknown kind of layer: 'slidng'. Did you mean sliding?"),
        ("TWO", "ATTN_BACKEND_PER_KIND='TWO': must be kind=BACKEND"),
        ("full=", "ATTN_BACKEND_PER_KIND='full=': must be kind=BACKEND"),
        ("full=ONE,full=TWO", "ATTN_BACKEND_PER_KIND='full=TWO': must be kind=BACKEND, comma-separated, each kind once"),
    ],
)
def test_a_malformed_variable_of_backends_per_kind(value, message, three, monkeypatch):
    monkeypatch.setenv("ATTN_BACKEND_PER_KIND", value)
    for ask in (pick, lambda: select(sliding())):  # an entry for another kind is checked too
        with pytest.raises(ValueError, match=message):
            ask()
    with pytest.raises(TypeError, match="member or a name, not 3"):
        selector.backend_per_kind({"full": 3})


def test_a_backend_per_kind_decides_the_framework_of_a_bare_string(platform, make_backend):
    selector.backend_per_kind({"full": "XLA_ATTN"})
    assert selector._framework("float32", make_request(64, "float32")) == "jax"


# --- many at once --------------------------------------------------------------------------------------------------


def test_a_first_call_from_many_threads_runs_its_body_once(three, monkeypatch):
    original, runs = selector._backend_for, []

    def counting(*args):
        runs.append(args)
        threading.Event().wait(0.02)
        return original(*args)

    monkeypatch.setattr(selector, "_backend_for", counting)
    barrier, found = threading.Barrier(8), []

    def ask():
        barrier.wait()
        found.append(get_attn_backend(64, "float32", None, 16, False))

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(runs) == 1 and len(found) == 8 and len(set(found)) == 1


def test_registering_while_others_select(three, make_backend):
    stop, failures = threading.Event(), []

    def churn():
        while not stop.is_set():
            for number in range(20):
                register_backend(f"CHURN_{number}", make_backend(priority=-1))
            for number in range(20):
                AttentionBackendEnum[f"CHURN_{number}"].clear_override()

    def ask():
        for _ in range(150):
            try:
                assert pick() == "ONE"
            except Exception as error:
                failures.append(error)

    threads = [threading.Thread(target=churn), *(threading.Thread(target=ask) for _ in range(3))]
    for thread in threads:
        thread.start()
    for thread in threads[1:]:
        thread.join()
    stop.set()
    threads[0].join()
    assert failures == []


class InChild(PlaceholderAttentionBackend):
    """Found by name in a spawned child."""


class NeverAsked(platforms.Platform):
    """The platform of a request that names its backend and its device."""

    device = priorities = None


def child(queue, member, request):
    """What a child process does: selects by the environment's name and with what it was sent."""
    register_backend("IN_CHILD", InChild)
    os.environ["ATTN_BACKEND"] = "IN_CHILD"
    selection = select(request, device=Device("torch", "cpu"), platform=NeverAsked())
    free = get_attn_backend(request.head_size, request.dtype, None, 16, True)
    queue.put((free.get_name(), selection.name, selection.source, member is AttentionBackendEnum.CPU_ATTN))


@pytest.mark.parametrize("method", ["fork", "spawn"])
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning", "ignore:.*fork.*:RuntimeWarning")
def test_a_child_selects_though_its_parent_was_selecting(method, three):
    """Members and requests travel by name; a lock that another thread of the parent holds does not hang the child."""
    if method not in multiprocessing.get_all_start_methods():
        pytest.skip(f"this system has no {method}")
    assert pick() == "ONE"
    context = multiprocessing.get_context(method)
    queue, taken, release = context.Queue(), threading.Event(), threading.Event()

    def hold():
        from attn import logger
        from attn.selection import plugins

        with selector._cold(), plugins._lock(), logger._lock():
            plugins.forget()  # so that the child has to load them itself
            taken.set()
            release.wait()

    holder = threading.Thread(target=hold)
    holder.start()
    taken.wait()
    arguments = (queue, AttentionBackendEnum.CPU_ATTN, make_request(64, "float32", None, 16))
    process = context.Process(target=child, args=arguments)
    process.start()
    try:
        assert queue.get(timeout=60) == ("NO_ATTENTION", "IN_CHILD", "ATTN_BACKEND", True)
    finally:
        release.set()
        holder.join()
        process.join(20)
        if process.is_alive():
            process.kill()


def test_selections_travel_by_name(three):
    selection = select(make_request(64, "float32"), backend="NO_ATTENTION")
    assert pickle.loads(pickle.dumps(selection)) == selection


# --- the branches ------------------------------------------------------------------------------------------------


def test_attention_free_needs_no_framework(three, monkeypatch):
    def no_framework():
        raise ImportError("neither torch nor jax is installed")

    monkeypatch.setattr(selector, "default_framework", no_framework)
    found = get_attn_backend(64, "float32", None, 16, is_attention_free=True)
    assert found is PlaceholderAttentionBackend
    assert get_attn_backend(64, "float32", None, 16, True, num_heads=4) is found
    impl = found.get_impl_cls()(8, 64, 0.125, None, None, None, "auto", None, "decoder", None)
    with pytest.raises(UnsupportedError, match="NO_ATTENTION was selected"):
        impl.forward(None, None, None, None, None, None)
    assert found.get_builder_cls() is PlaceholderAttentionMetadataBuilder
    assert found.get_builder_cls()(None).build(0, "batch").common == "batch"
    assert found.get_metadata_cls()(common="batch").common == "batch" and found.get_kv_cache_shape(1, 2, 3, 4) == (0,)


def test_no_attention_by_name_refuses_attention(three):
    assert issubclass(NoAttentionBackend, PlaceholderAttentionBackend)
    with pytest.raises(UnsupportedError, match="serves attention-free models only"):
        select(make_request(64, "float32"), backend="NO_ATTENTION").require()


def test_block_sparse_wins_over_attention_free_and_is_judged(three, make_backend, monkeypatch):
    sparse = make_backend("SPARSE", features={"block_sparse"}, head_sizes=(64,))
    asked = []

    def load(name, path):
        asked.append(path)
        return Candidate(name, path, sparse)

    monkeypatch.setattr(registry, "load_candidate", load)
    for free in (False, True):
        assert get_attn_backend(64, "float32", None, 16, free, is_blocksparse=True) is sparse
    assert asked[0] == "attn.torch.backends.blocksparse_attn.BlocksparseFlashAttentionBackend"
    with pytest.raises(UnsupportedError, match=r"head_size=80 \(supports 64\)"):
        get_attn_backend(80, "float32", None, 16, False, is_blocksparse=True)


def test_block_sparse_does_not_serve_dense(three, make_backend):
    register_backend("TWO", make_backend("TWO", features={"block_sparse"}), override=True)
    assert str(select(make_request(64, "float32")).trace[1]) == "serves block_sparse only"


def test_mla_asks_for_mla(three, make_backend):
    register_backend("LATENT", make_backend("LATENT", features={"mla"}, head_sizes=(576,)))
    three.names = ("ONE", "LATENT")
    assert pick(head_size=576, use_mla=True) == "LATENT"
    assert pick(head_size=576) == "ONE"
    assert make_request(576, "float32", use_mla=True).features == {"mla"}


# --- custom backends in automatic choice ---------------------------------------------------------------------------


def test_custom_backends_stand_before_or_after_the_list(three, make_backend):
    for name, priority in (("LAST", -1), ("B_AFTER", 0), ("A_AFTER", 0), ("BEFORE", 1), ("FIRST", 2)):
        register_backend(name, make_backend(name, priority=priority))
    register_backend(AttentionBackendEnum.CUSTOM, make_backend("CUSTOM"))
    order = [v.name for v in select(make_request(64, "float32")).trace]
    assert order == ["FIRST", "BEFORE", "ONE", "TWO", "THREE", "A_AFTER", "B_AFTER", "CUSTOM", "LAST"]


def test_a_custom_backend_without_capabilities_is_taken_only_by_name(platform, make_backend):
    bare = make_backend("BARE")
    bare.capabilities = None
    register_backend("BARE", bare)
    with pytest.raises(UnsupportedError):
        pick()
    assert select(make_request(64, "float32"), backend="BARE").require() is bare


def test_a_class_that_is_no_backend_may_be_registered_and_is_never_chosen(three):
    class Thing:
        @staticmethod
        def get_name():
            return "THING"

    three.names = ("ONE", "TWO")
    register_backend("THING", Thing)
    register_backend(AttentionBackendEnum["ONE"], dict)
    why = "Thing lacks what every attention backend has: get_impl_cls()"
    assert AttentionBackendEnum["THING"].get_class() is Thing
    for backend, reason in (("THING", why), ("ONE", "dict lacks what every attention backend has: get_name(), get_impl_cls()")):
        with pytest.raises(UnsupportedError, match=re.escape(reason)):
            select(make_request(64, "float32"), backend=backend).require()
    automatic = select(make_request(64, "float32"))
    assert automatic.name == "TWO" and {v.name: str(v) for v in automatic.trace}["THING"] == why


def test_a_custom_backend_that_cannot_be_loaded_is_a_row_of_the_table(three):
    register_backend("LOST", "no_such_module_anywhere.Backend")
    assert pick() == "ONE"
    lost = next(v for v in select(make_request(64, "float32")).trace if v.name == "LOST")
    assert "No module named 'no_such_module_anywhere'" in str(lost)


def test_a_module_that_registers_another_backend_while_it_is_judged(three, tmp_path, monkeypatch):
    source = "from attn.backends.registry import register_backend\nregister_backend('SECOND', 'no_such_module.Backend')"
    (tmp_path / "registering_vendor.py").write_text(source)
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.invalidate_caches()
    register_backend("A_FIRST", "registering_vendor.Backend")
    assert pick() == "ONE" and "SECOND" in AttentionBackendEnum


def test_an_overridden_member_keeps_its_place(three, make_backend):
    three.names = ("FLASH_ATTN", "ONE")
    register_backend(AttentionBackendEnum.FLASH_ATTN, make_backend("MY_FLASH"))
    assert pick() == "MY_FLASH"
    assert [v.name for v in select(make_request(64, "float32")).trace][:2] == ["FLASH_ATTN", "ONE"]


# --- which framework -----------------------------------------------------------------------------------------------


def test_a_dtype_object_decides_the_framework(three, make_backend):
    torch = pytest.importorskip("torch")
    assert pick(torch.float32) == "ONE"
    for dtype in (np.float32, np.dtype("float32")):
        with pytest.raises(UnsupportedError, match=r"framework=jax \(supports torch\)"):
            pick(dtype)


def test_a_forced_backend_decides_the_framework_of_a_bare_string(platform, make_backend):
    register_backend("JAXY", make_backend("JAXY", framework="jax"))
    with global_force_attn_backend_context_manager("JAXY"):
        assert pick("float32") == "JAXY"
        with pytest.raises(UnsupportedError, match=r"framework=torch \(supports jax\)"):
            pick(pytest.importorskip("torch").float32)


@pytest.mark.parametrize(
    ("asked", "loaded", "installed", "torch_has", "jax_has", "framework"),
    [
        ("jax", {"torch"}, {"torch", "jax"}, "cuda", "cpu", "jax"),
        ("torch", {"jax"}, {"torch", "jax"}, "cpu", "tpu", "torch"),
        ("", {"jax"}, {"torch", "jax"}, "cuda", "cpu", "jax"),
        (None, {"torch"}, {"torch", "jax"}, "cpu", "tpu", "torch"),
        (None, set(), {"jax"}, None, "cpu", "jax"),
        (None, set(), {"torch"}, "cpu", None, "torch"),
        (None, set(), {"torch", "jax"}, "cuda", "tpu", "jax"),
        (None, set(), {"torch", "jax"}, "cuda", "gpu", "torch"),
        (None, set(), {"torch", "jax"}, "rocm", "cpu", "torch"),
        (None, set(), {"torch", "jax"}, "cpu", "gpu", "jax"),
        (None, set(), {"torch", "jax"}, "cpu", "cpu", "torch"),
        (None, {"torch", "jax"}, {"torch", "jax"}, "cpu", "cpu", "torch"),
        (None, {"torch", "jax"}, {"torch", "jax"}, "xpu", "tpu", "jax"),
    ],
)
def test_default_framework(asked, loaded, installed, torch_has, jax_has, framework, monkeypatch):
    if asked is not None:
        monkeypatch.setenv("ATTN_FRAMEWORK", asked)
    for name in ("torch", "jax"):
        monkeypatch.setitem(sys.modules, name, sys) if name in loaded else monkeypatch.delitem(sys.modules, name, False)
    monkeypatch.setattr(platforms, "installed", lambda name: name in installed)
    names = {"torch": torch_has, "jax": jax_has}
    monkeypatch.setattr(platforms, "platform_for", lambda framework: type("P", (), {"name": names[framework]}))
    assert platforms.default_framework() == framework


def test_default_framework_without_any(monkeypatch):
    for name in ("torch", "jax"):
        monkeypatch.delitem(sys.modules, name, False)
    monkeypatch.setattr(platforms, "installed", lambda name: False)
    with pytest.raises(ImportError, match=r"neither torch nor jax is installed: pip install 'torch>=2.8', or pip"):
        platforms.default_framework()
    monkeypatch.setenv("ATTN_FRAMEWORK", "tinygrad")
    with pytest.raises(ValueError, match=r"ATTN_FRAMEWORK='tinygrad' \(supports torch, jax\)"):
        platforms.default_framework()


def test_platform_for_names_what_is_wrong(monkeypatch):
    with pytest.raises(ValueError, match=r"framework='tinygrad' \(supports torch, jax\)"):
        platforms.platform_for("tinygrad")
    monkeypatch.setattr(platforms, "installed", lambda name: False)
    with pytest.raises(BackendLoadError, match=r"jax is not installed: pip install 'jax>=0.10.1' 'flax>=0.12.8'"):
        platforms.platform_for("jax")


# --- devices that are not here -------------------------------------------------------------------------------------

ELSEWHERE = [
    Device("torch", "cuda", "NVIDIA H200", "sm_90"),
    Device("torch", "cuda", "NVIDIA B200", "sm_100"),
    Device("torch", "rocm", "AMD Instinct MI300X", "gfx942"),
    Device("torch", "xpu", "Intel Data Center GPU Max 1550"),
    Device("torch", "cpu", "x86_64 CPU", "x86_64"),
]


@pytest.mark.parametrize("device", ELSEWHERE, ids=lambda d: d.name)
@pytest.mark.parametrize("use_mla", [False, True], ids=["mha", "mla"])
def test_another_machine_can_be_asked_about(device, use_mla):
    pytest.importorskip("torch")
    selection = select(make_request(576 if use_mla else 128, "bfloat16", None, 16, use_mla=use_mla), device=device)
    assert selection.device == device and f" on {device}" in str(selection)
    known = set(AttentionBackendEnum.__members__)
    assert {v.name for v in selection.trace} <= known
    assert len({v.name for v in selection.trace}) == len(selection.trace)
    assert selection.trace or (use_mla and device.platform == "cpu")


def test_explaining_is_not_logged_as_a_warning(three, caplog):
    with caplog.at_level(logging.DEBUG, logger="attn"):
        for _ in range(3):
            select(make_request(64, "float32"))
    info = [r for r in caplog.records if r.levelno == logging.INFO]
    assert [r.getMessage() for r in info] == ["Using ONE attention backend on test CPU (torch)."]
    assert {r.levelno for r in caplog.records} == {logging.INFO, logging.DEBUG}
    assert info[0].funcName == "_logged", "a notice names the line that gave it"


def test_errors_are_of_one_tree():
    assert issubclass(UnsupportedError, AttnError) and issubclass(BackendLoadError, (AttnError, ImportError))
