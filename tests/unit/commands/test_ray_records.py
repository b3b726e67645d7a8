"""What a cluster found is kept as it comes, and never taken for what something else would give."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from dspark_trt.commands.ray_records import recorded
from dspark_trt.errors import RecipeError

LINES = [(1, "a"), (2, "b"), (3, "c")]


class Cluster:
    """Answers every line, and knows which ones it was asked for."""

    def __init__(self, **odd: Any) -> None:
        self.asked: list[int] = []
        self._odd = odd

    def __call__(self, lines: Sequence[tuple[int, str]]) -> Iterator[dict[str, Any]]:
        for number, text in lines:
            self.asked.append(number)
            yield {"line": number, "found": text.upper(), **self._odd}


def run(path: Path | None, cluster: Cluster, made_of: Any = "build") -> list[dict[str, Any]]:
    return list(recorded(path, made_of, LINES, cluster))


def test_second_run_asks_for_what_is_missing_and_gives_the_same(tmp_path: Path) -> None:
    path = tmp_path / "records"
    whole = run(path, Cluster())
    assert whole == run(None, Cluster())
    kept = path.read_text().splitlines()
    path.write_text(f'{kept[0]}\n{{"line": 2, "fo')
    cluster = Cluster()
    assert run(path, cluster) == whole
    assert cluster.asked == [2, 3]
    assert path.read_text().splitlines() == kept
    finished = Cluster()
    assert run(path, finished) == whole
    assert finished.asked == []


def test_interrupted_run_has_kept_what_came(tmp_path: Path) -> None:
    results = recorded(tmp_path / "records", "build", LINES, Cluster())
    next(results)
    assert len((tmp_path / "records").read_text().splitlines()) == 1


@pytest.mark.parametrize("odd", [{"error": "died"}, {"is_whole": False}])
def test_failed_and_cut_off_results_are_made_again(tmp_path: Path, odd: dict[str, Any]) -> None:
    path = tmp_path / "records"
    assert len(run(path, Cluster(**odd))) == 3
    assert path.read_text() == ""


@pytest.mark.parametrize("made_of", ["another build", {"max_tokens": 3}])
def test_records_of_something_else_are_refused(tmp_path: Path, made_of: Any) -> None:
    run(tmp_path / "records", Cluster())
    with pytest.raises(RecipeError, match=r"--records .*: line 1 was found on another build, with other prompts or"):
        run(tmp_path / "records", Cluster(), made_of)


def test_file_that_holds_no_records_is_refused(tmp_path: Path) -> None:
    (tmp_path / "records").write_text("a line of something else\nand another\n")
    with pytest.raises(RecipeError, match=r"line 1 is no record; give a new file"):
        run(tmp_path / "records", Cluster())
    with pytest.raises(RecipeError, match=r"--records .*cannot be read"):
        run(tmp_path, Cluster())
