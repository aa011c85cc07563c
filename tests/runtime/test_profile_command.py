"""``hap profile``: what it asks for, what it refuses in one line, what it leaves behind."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, Self

import pytest

from benchmarks import testbed
from hap import cli
from hap.cost_models.profile import CalibratedCluster, Profile
from tests.cost_models.test_profile import TWO, made


def invoke(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    """Exit code, stdout, stderr."""
    with pytest.raises(SystemExit) as exit_:
        cli.main(["profile", *arguments])
    out, err = capsys.readouterr()
    return int(exit_.value.code or 0), out, err


@pytest.fixture
def described(tmp_path: Path) -> str:
    path = tmp_path / "cluster.yaml"
    path.write_text(TWO.to_yaml())
    return str(path)


@pytest.fixture(autouse=True)
def unchanged_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))


class Played:
    """Stands in for the testbed: its ranks answer ``answer``, or raise it."""

    answer: Any = None

    def __init__(self, cluster: Any) -> None:
        assert cluster.fingerprint == TWO.fingerprint

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None: ...

    def run(self, target: Any, *args: Any, timeout: float) -> list[str]:
        if isinstance(self.answer, Exception):
            raise self.answer
        return [self.answer] * 2


def test_off_a_job_it_needs_a_cluster(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in ((), ("--testbed",)):
        code, out, err = invoke(capsys, *arguments)
        assert code and not out
        assert "hap profile needs --cluster" in err and len(err.strip().splitlines()) == 1


def test_a_machine_that_cannot_play_the_cluster_says_why(
    described: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(testbed.network, "missing", lambda: "needs root (it makes network namespaces)")
    code, _, err = invoke(capsys, "--testbed", "-c", described, "-o", f"{tmp_path}/p.json")
    assert code and err.strip().endswith("needs root (it makes network namespaces)")
    assert not (tmp_path / "p.json").exists()


def test_what_a_rank_refuses_is_told_in_one_line_and_nothing_is_written(
    described: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    trace = "rank 1 raised\nTraceback (most recent call last):\n  File ...\nhap.ProfileError: repeats differ by 80%\n"
    monkeypatch.setattr(Played, "answer", testbed.RankError(1, trace + "(then also rank 0)"))
    monkeypatch.setattr(testbed, "Testbed", Played)
    code, _, err = invoke(capsys, "--testbed", "-c", described, "-o", f"{tmp_path}/p.json")
    assert code and err.strip().endswith("rank 1: hap.ProfileError: repeats differ by 80%")
    assert len(err.strip().splitlines()) == 1 and not (tmp_path / "p.json").exists()


def test_the_profile_is_written_told_with_its_residuals_and_fits_the_cluster(
    described: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Played, "answer", made().model_dump_json())
    monkeypatch.setattr(testbed, "Testbed", Played)
    code, out, err = invoke(capsys, "--testbed", "-c", described, "-o", f"{tmp_path}/p.json")
    assert code == 0 and f"wrote {tmp_path}/p.json" in err
    assert "rank 0 to 1: 320 Mbit/s, 1000 us, spread 0.0%" in out  # 40e6 bytes/s
    assert "all_reduce by ring: fits within" in out
    loaded = Profile.load(tmp_path / "p.json")
    assert loaded == made() and isinstance(loaded.calibrate(TWO), CalibratedCluster)
