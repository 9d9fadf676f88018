"""Identity covers the science alone; overrides have the types of their fields."""

import pytest
from tiny_runs import run_config

from ncp_jax.config import (
    NOT_IDENTITY,
    ConfigError,
    frozen,
    identity,
    load,
    nearest_multiples,
    override,
    science,
    to_dict,
)


@pytest.mark.parametrize("name", NOT_IDENTITY)
def test_run_arguments_exist_and_are_outside_the_identity(name):
    values = to_dict(run_config("corpus", "run"))
    here = values
    *parents, last = name.split(".")
    for parent in parents:
        here = here[parent]
    assert last in here, f"{name} is no field of RunConfig"
    here[last] = "changed"
    assert science(values) == science(to_dict(run_config("corpus", "run")))


@pytest.mark.parametrize(
    "change",
    [
        "train.steps=21", "train.batch=16", "train.seed=1", "train.micro_batches=2", "train.precision=bfloat16",
        "data.shuffle_seed=1", "data.packing=concat", "data.sequence=32", "data.mixture=[{path: other}]",
        "optim.adam_learning_rate=0.1", "optim.schedule.kind=constant", "model.concept.codes=16", "init_from.run=other",
    ],
)  # fmt: skip
def test_science_changes_the_identity(change):
    assert identity(run_config("corpus", "run", "ncp", change)) != identity(run_config("corpus", "run"))


def test_where_and_how_it_runs_do_not():
    changes = ("mesh.data=4", "checkpoint.keep=9", "evaluation.every=3", "data.prefetch=0", "train.on_bad_step=skip")
    assert identity(run_config("corpus", "elsewhere", "ncp", *changes)) == identity(run_config("corpus", "run"))


@frozen
class Inner:
    rate: float = 1.0
    name: str | None = None


@frozen
class Outer:
    count: int = 1
    flag: bool = False
    span: int | float = 0.5
    inner: Inner = Inner()
    maybe: Inner | None = None
    many: tuple[Inner, ...] = ()


@pytest.mark.parametrize(
    ("pair", "get", "value"),
    [
        ("count=3", lambda c: c.count, 3),
        ("flag=true", lambda c: c.flag, True),
        ("inner.rate=1e-3", lambda c: c.inner.rate, 0.001),
        ("inner.rate=2", lambda c: c.inner.rate, 2.0),
        ("span=7", lambda c: c.span, 7),
        ("span=0.25", lambda c: c.span, 0.25),
        ("inner.name=1.5e3x", lambda c: c.inner.name, "1.5e3x"),
        ("inner.name=null", lambda c: c.inner.name, None),
        ("inner={rate: 3}", lambda c: c.inner, Inner(rate=3.0)),
        ("maybe.rate=4", lambda c: c.maybe, Inner(rate=4.0)),
        ("many=[{rate: 1}, {name: b}]", lambda c: c.many, (Inner(1.0), Inner(name="b"))),
    ],
)
def test_overrides_are_typed(pair, get, value):
    found = get(override(Outer(), [pair]))
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize(
    ("pair", "message"),
    [
        ("count=2.5", "config field 'count'"),
        ("count=yes please", "config field 'count'.*'yes please'"),
        ("flag=2", "config field 'flag'"),
        ("inner.rat=1", "unknown config field 'inner.rat'; did you mean 'inner.rate'?"),
        ("inner.zzz=1", "unknown config field 'inner.zzz'; fields here: inner.rate, inner.name"),
        ("count.x=1", "unknown config field 'count'"),
        ("maybe.rat=1", "unknown config field 'maybe.rat'"),
        ("count", "override 'count' has no '='"),
    ],
)
def test_bad_overrides_name_the_field(pair, message):
    with pytest.raises(ConfigError, match=message):
        override(Outer(), [pair])


@pytest.mark.parametrize(("value", "step", "text"), [(18, 4, "16 or 20"), (3, 8, "8"), (16, 8, "16 or 24")])
def test_nearest_multiples(value, step, text):
    assert nearest_multiples(value, step) == text


def test_a_file_without_config(tmp_path):
    (tmp_path / "empty.py").write_text("")
    with pytest.raises(ConfigError, match=r"empty.py has no function config\(\)"):
        load(tmp_path / "empty.py")
