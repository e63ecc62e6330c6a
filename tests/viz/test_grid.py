"""The pictures: text and SVG say the same, colour is never the only sign, contrast is enough."""

from __future__ import annotations

import base64
import itertools
import re
import subprocess
import sys
import xml.etree.ElementTree as ET
from html import unescape

import pytest
import torch

from minivllm.attention.metadata import CommonAttentionMetadata
from minivllm.core.block_hash import BlockHash
from minivllm.core.block_pool import BlockPool
from minivllm.core.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheTensor,
    SlidingWindowSpec,
)
from minivllm.core.scheduler_output import CachedRequestData, NewRequestData, SchedulerOutput
from minivllm.sampling.params import SamplingParams
from minivllm.viz.grid import INK, PALETTE, PAPER, Cell, Grid, ascii_grid, mark_changes, owner, svg_grid
from minivllm.viz.structures import (
    AttentionMetadataView,
    BlockTableView,
    CacheView,
    GroupLayoutView,
    KVPoolView,
    SlotMappingView,
    Structure,
    TimelineView,
    svg,
)
from minivllm.worker.block_table import BlockTable


def block_table() -> BlockTable:
    table = BlockTable(4, 3, 4, 8, "cpu")
    table.append_row([7, 2], 0)
    table.append_row([0, 5, 3], 1)
    table.compute_slot_mapping(2, torch.tensor([0, 1, 4]), torch.tensor([6, 8, 9, 10]))
    return table


def groups() -> GroupLayoutView:
    page = {"block_size": 4, "num_kv_heads": 1, "head_size": 8, "dtype": "float32"}
    full = FullAttentionSpec(**page)  # type: ignore[arg-type]
    window = SlidingWindowSpec(**page, sliding_window=6)  # type: ignore[arg-type]
    size, stride = 10 * full.page_size_bytes * 2, 10 * full.page_size_bytes
    place = {"size": size, "layer_stride": stride, "block_stride": full.page_size_bytes}
    return GroupLayoutView.of(
        KVCacheConfig(
            num_blocks=10,
            kv_cache_tensors=(
                KVCacheTensor(layers=("layers.0", "layers.2"), **place),  # type: ignore[arg-type]
                KVCacheTensor(layers=("layers.1", "layers.3"), **place),  # type: ignore[arg-type]
            ),
            kv_cache_groups=(
                KVCacheGroupSpec(layer_names=("layers.0", "layers.2"), kv_cache_spec=full),
                KVCacheGroupSpec(layer_names=("layers.1", "layers.3"), kv_cache_spec=window),
            ),
        )
    )


def metadata() -> AttentionMetadataView:
    starts, lengths = torch.tensor([0, 1, 4]), torch.tensor([7, 11])
    common = CommonAttentionMetadata(
        query_start_loc=starts,
        query_start_loc_cpu=starts,
        seq_lens=lengths,
        seq_lens_cpu=lengths,
        num_computed_tokens_cpu=torch.tensor([6, 8]),
        num_reqs=2,
        num_actual_tokens=4,
        max_query_len=3,
        max_seq_len=11,
        block_table_tensor=block_table().get_device_tensor(2),
        slot_mapping=block_table().slot_mapping[:4],
    )
    return AttentionMetadataView.of(common, ["A", "B"], block_size=4)


STATES: dict[str, Structure] = {
    "block_table": BlockTableView.of(block_table(), ["A", "B", "C"]),
    "slot_mapping": SlotMappingView.of(block_table(), ["A", "B"], [0, 1, 4], [6, 8, 9, 10], padded_to=6),
    "cache": CacheView.of(8, 4, {"A": ([7, 2], 6), "B": ([7, 5], 7)}),
    "pool": KVPoolView(ref_counts=(0, 2, 0, 0), hashes=("", "h0", "h1", ""), free_queue=(3, 2)),
    "groups": groups(),
    "timeline": TimelineView(
        steps=(
            (("A", "prefill", 4), ("B", "prefill", 3)),
            (("A", "decode", 1), ("B", "preempted", 0)),
            (("B<3", "prefill", 2),),
        )
    ),
    "metadata": metadata(),
}
EACH = pytest.mark.parametrize("state", STATES.values(), ids=STATES)


def texts(picture: str) -> list[str]:
    """Every text of an SVG image, in reading order."""
    return [element.text or "" for element in ET.fromstring(picture).iter("{http://www.w3.org/2000/svg}text")]


@EACH
def test_text_and_picture_say_the_same(state: Structure) -> None:
    words = " ".join(texts(svg(state))).split()
    assert words == repr(state).split()
    assert words


@EACH
def test_colour_is_never_the_only_sign(state: Structure) -> None:
    """Cells of two kinds differ in text, or stand in rows or columns of different names."""
    grid = state.grid()
    places = [
        (cell.text, label, head, cell.kind) for label, cells in grid.rows for cell, head in zip(cells, grid.columns)
    ]
    for (text, row, column, kind), (other_text, other_row, other_column, other_kind) in itertools.combinations(
        places, 2
    ):
        if kind != other_kind:
            assert text != other_text or row != other_row or column != other_column


def luminance(colour: str) -> float:
    channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    red, green, blue = (c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in channels)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(a: str, b: str) -> float:
    dark, light = sorted([luminance(a), luminance(b)])
    return (light + 0.05) / (dark + 0.05)


@pytest.mark.parametrize("kind", PALETTE)
def test_contrast(kind: str) -> None:
    assert contrast(INK, PALETTE[kind].fill) >= 4.5
    assert contrast(PALETTE[kind].border, PAPER) >= 4.5


def test_the_contrast_formula() -> None:
    assert contrast("#000000", "#ffffff") == pytest.approx(21)
    assert contrast("#777777", "#ffffff") == pytest.approx(4.48, abs=0.01)


@EACH
def test_a_picture_uses_no_other_colours(state: Structure) -> None:
    known = {INK, PAPER, *(style.fill for style in PALETTE.values()), *(style.border for style in PALETTE.values())}
    assert set(re.findall(r"#[0-9a-f]{6}", svg(state))) <= known


@EACH
def test_html_is_an_image_with_its_own_data(state: Structure) -> None:
    html = state._repr_html_()
    found = re.fullmatch(r'<img src="data:image/svg\+xml;base64,([^"]+)" alt="([^"]+)">', html)
    assert found
    assert base64.b64decode(found[1]).decode() == svg(state)
    assert unescape(found[2]).replace("; ", " ").split() == repr(state).replace("; ", " ").split()


@EACH
def test_text_lies_inside_the_picture(state: Structure) -> None:
    root = ET.fromstring(svg(state))
    width, height = float(root.attrib["width"]), float(root.attrib["height"])
    for element in root.iter("{http://www.w3.org/2000/svg}text"):
        length = len(element.text or "") * 8
        left = float(element.attrib["x"]) - (length / 2 if element.attrib["text-anchor"] == "middle" else 0)
        assert left >= 0
        assert left + length <= width
        assert float(element.attrib["y"]) < height


def test_text_is_escaped() -> None:
    grid = Grid(title="a < b & c", columns=("<x>",), rows=(('"row"', (Cell("1 < 2"),)),))
    assert texts(svg_grid(grid)) == ["a < b & c", "<x>", '"row"', "1 < 2"]


def test_columns_are_aligned() -> None:
    lines = ascii_grid(Grid("t", ("a", "long"), (("r", (Cell("100"), Cell("2"))),))).splitlines()
    assert lines == ["t", "     a  long", "r  100     2"]


def test_changes_are_marked_and_only_they() -> None:
    before = BlockTableView(4, (("A", (7, 2)),)).grid()
    after = BlockTableView(4, (("A", (7, 3)), ("B", (5,)))).grid()
    marked = dict(mark_changes(before, after).rows)
    assert [cell.text for cell in marked["row 0: A"]] == ["7", "3*"]
    assert [cell.text for cell in marked["row 1: B"]] == ["5*", ""]
    assert mark_changes(after, after) == after


def test_a_snapshot_does_not_follow_the_structure() -> None:
    table = block_table()
    view = BlockTableView.of(table, ["A"])
    before = repr(view)
    table.append_row([6], 0)
    assert repr(view) == before
    assert repr(BlockTableView.of(table, ["A"])) != before


def test_what_the_views_say() -> None:
    assert SlotMappingView.of(block_table(), ["A", "B"], [0, 1, 4], [6, 8, 9, 10]).tokens == (
        ("A", 6, 10),
        ("B", 8, 12),
        ("B", 9, 13),
        ("B", 10, 14),
    )
    assert metadata().requests == (("A", 0, 1, 7, (7, 2)), ("B", 1, 4, 11, (0, 5, 3)))
    assert "B 3" in repr(CacheView.of(8, 4, {"B": ([7], 4)}))
    assert "A+B 0" in repr(CacheView.of(8, 4, {"A": ([7], 4), "B": ([7], 4)}))
    assert [start for start, _, _ in groups().layers] == [0, 0, 2560, 2560]


def test_the_pool_as_it_is() -> None:
    pool = BlockPool(num_gpu_blocks=6, enable_caching=True, hash_block_size=4)
    first, second, third = pool.get_new_blocks(3)
    pool.cache_block(first, BlockHash(b"one"), group_id=0)
    pool.cache_block(second, BlockHash(b"one"), group_id=0)
    pool.touch([first])
    pool.free_blocks([second, third])
    assert KVPoolView.of(pool) == KVPoolView(
        ref_counts=(0, 2, 0, 0, 0, 0), hashes=("", "h0", "h0", "", "", ""), free_queue=(3, 4, 5, 2)
    )
    states = [cell.text for cell in KVPoolView.of(pool).grid().rows[0][1]]
    assert states == ["null", "used", "cached", "free", "free", "free"]


def test_the_timeline_of_scheduler_outputs() -> None:
    def new(name: str, length: int, hit: int = 0) -> NewRequestData:
        params = SamplingParams()
        return NewRequestData(
            req_id=name,
            prompt_token_ids=[1] * length,
            sampling_params=params,
            block_ids=([1],),
            num_computed_tokens=hit,
        )

    def output(
        news: list[NewRequestData], cached: dict[str, int], tokens: dict[str, int], *out: str
    ) -> SchedulerOutput:
        data = CachedRequestData(req_ids=list(cached), num_computed_tokens=list(cached.values()))
        total = sum(tokens.values())
        return SchedulerOutput(
            scheduled_new_reqs=news,
            scheduled_cached_reqs=data,
            num_scheduled_tokens=tokens,
            total_num_scheduled_tokens=total,
            preempted_req_ids=list(out),
        )

    view = TimelineView.of(
        [
            output([new("A", 6), new("B", 9, hit=8)], {}, {"A": 4, "B": 1}),
            output([], {"A": 4, "B": 9}, {"A": 2, "B": 1}),
            output([], {"A": 6}, {"A": 1}, "B"),
        ]
    )
    assert view.steps == (
        (("A", "prefill", 4), ("B", "prefill", 1)),
        (("A", "prefill", 2), ("B", "decode", 1)),
        (("A", "decode", 1), ("B", "preempted", 0)),
    )
    assert [cell.text for cell in view.grid().rows[-1][1]] == ["5", "3", "1"]


def test_owners_repeat_after_six() -> None:
    assert owner(0) == owner(6) == "owner0"
    assert len({owner(i) for i in range(6)}) == 6
    assert all(owner(i) in PALETTE for i in range(6))


def test_a_row_must_fill_its_columns() -> None:
    with pytest.raises(ValueError, match="row 'r' has 1 cells for 2 columns"):
        Grid(title="", columns=("a", "b"), rows=(("r", (Cell("1"),)),))


def test_a_structure_needs_a_grid() -> None:
    with pytest.raises(NotImplementedError, match="Structure draws nothing"):
        Structure().grid()


def test_jupyter_is_not_needed_to_import() -> None:
    code = (
        "import sys; import minivllm, minivllm.viz.structures, minivllm.viz.stepper, minivllm.check.exercise;"
        "print([name for name in ('ipywidgets', 'IPython', 'jupyterlab') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
