"""`convpool doctor` on whatever machine this is."""

from __future__ import annotations

from click.testing import CliRunner

from convpool import doctor


def test_report_fits_a_screen_and_names_every_part():
    result = CliRunner().invoke(doctor.main, ["doctor"], env={"COLUMNS": "100"})
    assert result.exit_code == 0, result.output
    lines = result.output.splitlines()
    assert len(lines) <= 30
    for what in ("convpool", "driver", "GPU", "library", "architectures", "TensorRT"):
        assert any(line.startswith(what) for line in lines), what
    assert lines[-1].startswith("Works: the optimizer")


def test_missing_library_comes_with_advice(monkeypatch, tmp_path):
    monkeypatch.setenv("CONVPOOL_LIBRARY", str(tmp_path / "libconvpool.so"))
    library = next(f for f in doctor.findings() if f.what == "library")
    assert library.state == doctor.MISSING and "install" in library.advice


def test_covered_architectures():
    built = [75, 80, 90]
    assert [cc for cc in (70, 75, 80, 86, 89, 90, 100) if doctor._covered(cc, built)] == [75, 80, 86, 89, 90, 100]
