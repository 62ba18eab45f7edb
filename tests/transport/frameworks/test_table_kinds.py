"""Tables, pictures, sparse matrices and jax arrays: equal on the other side, and never inside the pickle."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pytest
import safetensors.numpy
import scipy.sparse
from PIL import Image

from skyward.transport.payload import Packer, unpack
from tests.support.journeys import travel

SMALL = 12_000
ROWS = 300_000


@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("kind", ["bfloat16", "float8_e4m3fn", "int4"])
def test_a_numpy_array_of_another_packages_type_travels_beside_the_pickle(kind: str, order: Any) -> None:
    sent = np.ones((ROWS, 8), dtype=getattr(ml_dtypes, kind), order=order)
    sent[5, 1] = 0
    for value in (sent, sent[::2]):
        journey = travel(value)
        assert journey.value.dtype == sent.dtype
        assert np.array_equal(journey.value.astype("f4"), value.astype("f4"))
        assert journey.on_sockets < SMALL
        journey.value[0] = 0
    assert travel(sent).value.strides == sent.strides


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8", "bool", "complex64"])
def test_a_jax_array_travels_beside_the_pickle(dtype: str) -> None:
    sent = jnp.arange(2 * ROWS).reshape(2, -1).astype(dtype)
    journey = travel({"x": sent})
    got = journey.value["x"]
    assert isinstance(got, jax.Array)
    assert (got.dtype, got.shape, got.weak_type) == (sent.dtype, sent.shape, sent.weak_type)
    assert bool((got == sent).all())
    assert journey.on_sockets < (SMALL if sent.nbytes >= 1 << 20 else sent.nbytes + SMALL)


def test_a_jax_array_uses_the_memory_that_it_came_in() -> None:
    got = travel(jnp.arange(float(ROWS))).value
    assert np.asarray(got).__array_interface__["data"][0] % 4096 == 0  # a mapped file begins on a page


def test_small_weak_and_special_jax_arrays_travel() -> None:
    weak = jnp.asarray(3.0) if jnp.asarray(3.0).weak_type else jax.lax.full((), 3.0).astype(float)
    for sent in (weak, jnp.zeros((0, 2)), jnp.asarray(5)):
        got = travel(sent).value
        assert (got.dtype, got.shape, got.weak_type) == (sent.dtype, sent.shape, sent.weak_type)
    key = jax.random.split(jax.random.key(7), 3)
    assert (jax.random.key_data(travel(key).value) == jax.random.key_data(key)).all()
    tree = {"w": [jnp.ones(ROWS), (jnp.zeros(3), None)]}
    assert jax.tree.structure(travel(tree).value) == jax.tree.structure(tree)


def texts() -> list[str]:
    return [f"row {number}" for number in range(ROWS)]


def categories() -> pd.Categorical:
    return pd.Categorical.from_codes(np.arange(8 * ROWS) % 7, categories=[f"kind {n}" for n in range(7)])


COLUMNS: dict[str, Callable[[], Any]] = {
    "numbers": lambda: np.arange(ROWS) / 2,
    "texts": texts,
    "categories": categories,
    "arrow texts": lambda: pd.array(texts(), dtype="string[pyarrow]"),
    "arrow numbers": lambda: pd.array(np.arange(ROWS), dtype="int64[pyarrow]"),
    "missing": lambda: pd.array(np.arange(4 * ROWS), dtype="Int64"),
    "times": lambda: pd.date_range("2024", periods=ROWS, freq="s", tz="UTC"),
}


@pytest.mark.parametrize("name", COLUMNS)
def test_a_pandas_frame_travels_beside_the_pickle(name: str) -> None:
    sent = pd.DataFrame({"a": COLUMNS[name]()})
    journey = travel(sent)
    assert journey.value.equals(sent)
    assert list(journey.value.dtypes) == list(sent.dtypes)
    assert journey.on_sockets < SMALL
    assert journey.blobs > 0
    journey.value.loc[0, "a"] = journey.value.loc[1, "a"]
    assert sent.loc[0, "a"] != sent.loc[1, "a"]


def test_arrow_tables_and_arrays_travel_beside_the_pickle() -> None:
    table = pa.table({"n": pa.array(range(ROWS)), "t": pa.array([f"row {n}" for n in range(ROWS)])})
    for sent in (table, table.column("t"), table.to_batches()[0], pa.py_buffer(bytes(2_000_000))):
        journey = travel(sent)
        assert journey.value.equals(sent)
        assert journey.on_sockets < SMALL
    nested = pa.array([[{"a": n}] for n in range(ROWS)])
    assert travel(nested).value.equals(nested)


def test_a_polars_frame_travels_beside_the_pickle() -> None:
    sent = pl.DataFrame({"n": range(ROWS), "t": [f"row {n}" for n in range(ROWS)], "c": np.arange(ROWS) / 3})
    journey = travel(sent)
    assert journey.value.equals(sent)
    assert journey.on_sockets < SMALL
    series = travel(sent["t"])
    assert series.value.equals(sent["t"])
    assert series.on_sockets < SMALL


@pytest.mark.parametrize("kind", ["csr", "csc", "coo", "bsr"])
def test_a_sparse_matrix_travels_beside_the_pickle(kind: str) -> None:
    sent = scipy.sparse.random_array((2000, 2000), density=0.1, format=kind, rng=1)
    journey = travel(sent)
    assert type(journey.value) is type(sent)
    assert (journey.value != sent).nnz == 0
    assert journey.on_sockets < SMALL


@pytest.mark.parametrize("mode", ["RGB", "L", "RGBA", "F", "P"])
def test_a_picture_travels_beside_the_pickle(mode: str) -> None:
    sent = Image.effect_noise((1500, 1200), 50).convert(mode)
    journey = travel(sent)
    assert journey.value.mode == mode
    assert journey.value.tobytes() == sent.tobytes()
    assert journey.value.getpalette() == sent.getpalette()
    assert journey.on_sockets < SMALL


def test_what_safetensors_writes_and_reads_travels_beside_the_pickle() -> None:
    arrays = {"a": np.arange(ROWS, dtype="f4"), "b": np.ones((3, ROWS))}
    data = safetensors.numpy.save(arrays)
    for sent in (data, safetensors.numpy.load(data)):
        journey = travel(sent)
        assert journey.on_sockets < SMALL
        got = safetensors.numpy.load(journey.value) if isinstance(sent, bytes) else journey.value
        assert all(np.array_equal(got[name], array) for name, array in arrays.items())


def test_a_jax_array_needs_no_care_of_cloudpickle() -> None:
    packed = Packer().pack_simple({"x": jnp.ones(256), "y": jnp.ones(4, "bfloat16")})
    assert packed is not None
    assert float(unpack(*packed)["y"].sum()) == 4
