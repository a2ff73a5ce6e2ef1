from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from deltastore.checkpoint import Layout, WeightFile, open_checkpoint
from deltastore.container import build_header, parse_header
from deltastore.materialize import DirectoryWriter
from deltastore.memory import ALIGNMENT
from deltastore.places import Places, Stretch
from deltastore.snapshot import CHUNK_BYTES, Schema, TensorSpec, chunk_spans

if TYPE_CHECKING:
    from pathlib import Path

DTYPES = ("U8", "BF16", "F32", "F64")


def layout_of(*files: list[TensorSpec]) -> tuple[Layout, Schema]:
    made = []
    for number, specs in enumerate(files):
        header = build_header([(spec.name, spec.dtype, spec.shape) for spec in specs], {})
        made.append(WeightFile(f"model-{number}.safetensors", header, parse_header(header, key="file")))
    layout = Layout(tuple(made))
    return layout, layout.schema()


def places_of(layout: Layout, schema: Schema) -> Places:
    return Places([file.header for file in layout.files], schema)


@st.composite
def layouts(draw: st.DrawFn) -> tuple[Layout, Schema]:
    """Return up to three files of tensors in any order, sizes and dtypes mixed, some empty, some of several chunks."""
    count = draw(st.integers(1, 14))
    sizes = st.one_of(st.integers(0, 40), st.sampled_from([CHUNK_BYTES // 4, CHUNK_BYTES // 2, CHUNK_BYTES // 2 + 3]))
    specs = [TensorSpec(f"t{n:02d}", draw(st.sampled_from(DTYPES)), (draw(sizes),)) for n in range(count)]
    files: list[list[TensorSpec]] = [[], [], []]
    for spec in draw(st.permutations(specs)):
        files[draw(st.integers(0, 2))].append(spec)
    return layout_of(*(file for file in files if file))


@given(layouts())
def test_a_phase_is_where_a_span_begins_in_a_cache_line(found: tuple[Layout, Schema]) -> None:
    layout, schema = found
    places = places_of(layout, schema)
    for span in chunk_spans(schema, np.arange(schema.chunks)):
        phase = places.phase(span)
        offset = next(iter(places.stretches(span))).offset
        assert phase % 8 == 0
        assert phase <= offset % ALIGNMENT < phase + 8


@given(layouts(), st.data())
def test_stretches_cover_each_chunk_once_and_nothing_else(found: tuple[Layout, Schema], data: st.DataObject) -> None:
    layout, schema = found
    chosen = data.draw(st.lists(st.booleans(), min_size=schema.chunks, max_size=schema.chunks))
    numbers = np.flatnonzero(np.array(chosen, bool))
    where = {
        placed.spec.name: (n, placed.start) for n, file in enumerate(layout.files) for placed in file.header.tensors
    }
    places = places_of(layout, schema)
    seen: list[int] = []
    nbytes = data.draw(st.sampled_from([1, 2, 3])) * CHUNK_BYTES
    for span in chunk_spans(schema, numbers, nbytes=nbytes):
        assert span.nbytes <= nbytes
        assert (span.starts % schema.widths[span.tensors] == 0).all()
        assert (span.starts[1:] >= span.stops[:-1]).all()
        wanted = set()
        for (spec, chunk, start, stop), number in zip(span, span.numbers.tolist(), strict=True):
            first, end = spec.chunk_range(chunk)
            assert schema.chunk_number(spec.name, chunk) == number
            assert stop - start == end - first
            file, offset = where[spec.name]
            wanted |= {(file, offset + first, start), (file, offset + end, stop)}
            seen.append(number)
        stretches = list(places.stretches(span))
        ends = {(s.file, s.offset, s.start) for s in stretches}
        ends |= {(s.file, s.offset + s.stop - s.start, s.stop) for s in stretches}
        assert ends <= wanted
        assert sum(s.stop - s.start for s in stretches) == int((span.stops - span.starts).sum())
        assert all(a.stop <= b.start for a, b in pairwise(stretches))
    assert seen == numbers.tolist()


def test_tiny_neighbours_are_one_stretch() -> None:
    layout, schema = layout_of([TensorSpec(f"t{n:04d}", "BF16", (1 + n % 7,)) for n in range(900)])
    (span,) = chunk_spans(schema, np.arange(schema.chunks))
    assert list(places_of(layout, schema).stretches(span)) == [
        Stretch(0, layout.files[0].header.size, 0, schema.nbytes),
    ]


def test_a_gap_in_the_buffer_is_never_taken_for_the_tensor_that_lies_there_in_the_file() -> None:
    # Two bytes of padding after "a" in the buffer, and the two bytes of "z" at that place of the file.
    layout, schema = layout_of(
        [TensorSpec("a", "BF16", (1,)), TensorSpec("z", "BF16", (1,)), TensorSpec("b", "F32", (1,))]
    )
    (span,) = chunk_spans(schema, np.array([0, 1]))
    start = layout.files[0].header.size
    assert list(places_of(layout, schema).stretches(span)) == [Stretch(0, start, 0, 2), Stretch(0, start + 4, 4, 8)]


def test_an_empty_choice_has_no_spans() -> None:
    _, schema = layout_of([TensorSpec("a", "U8", (5,))])
    assert list(chunk_spans(schema, np.zeros(0, np.int64))) == []


def test_what_a_writer_writes_span_by_span_a_checkpoint_reads(tmp_path: Path) -> None:
    rng = np.random.default_rng(7)
    sizes = [*rng.integers(0, 50, 300).tolist(), CHUNK_BYTES + 9, 3 * CHUNK_BYTES]
    specs = [TensorSpec(f"t{n:03d}", DTYPES[n % 4], (size,)) for n, size in enumerate(sizes)]
    layout, schema = layout_of(specs[1::2], specs[::2][::-1])
    data = {spec.name: rng.integers(0, 256, spec.nbytes, np.uint8) for spec in schema}
    index = ",".join(f'"{p.spec.name}":"{file.name}"' for file in layout.files for p in file.header.tensors)
    (tmp_path / "model.safetensors.index.json").write_text(f'{{"weight_map":{{{index}}}}}')
    buffer = np.zeros(CHUNK_BYTES, np.uint8)
    with DirectoryWriter(tmp_path, layout, places_of(layout, schema)) as writer:
        for span in chunk_spans(schema, np.arange(schema.chunks)):
            for spec, chunk, start, stop in span:
                buffer[start:stop] = data[spec.name][slice(*spec.chunk_range(chunk))]
            writer.write(span, buffer[: span.nbytes])
        writer.sync()
    checkpoint = open_checkpoint(tmp_path)
    for opened in (checkpoint, checkpoint.moved(tmp_path)):
        assert all((opened.tensor(name) == content).all() for name, content in data.items())
        for span in chunk_spans(schema, np.arange(schema.chunks)):
            opened.read(span, buffer)
            for spec, chunk, start, stop in span:
                assert (buffer[start:stop] == data[spec.name][slice(*spec.chunk_range(chunk))]).all()
