# SPDX-License-Identifier: Apache-2.0
"""Options as data: targets, rules by name, the flags that stand for them, limits and defaults."""

import pytest

import convpool
from convpool import options as limits
from convpool.cli.group import run
from convpool.cli.optimize import command
from convpool.errors import OptionError
from convpool.options import OF_OPERATORS, RULE_TEXTS, TARGETS, OptimizeOptions, options_for
from convpool.rules import STAGES
from models import generators


def test_every_pass_has_a_name_that_switches_it_and_every_name_a_pass():
    assert sorted(n for _, n in {(type(r), n) for stage in STAGES for r in stage.rules for n in r.names}) == sorted(RULE_TEXTS)
    assert all(target.rules <= RULE_TEXTS.keys() for target in TARGETS.values())
    standard = "pool_first upsample_last upsample_if resize_last resize_first fold_product chain_concats lower_operator fold"
    assert RULE_TEXTS.keys() - OF_OPERATORS == set(standard.split())


@pytest.mark.parametrize("name", RULE_TEXTS)
@pytest.mark.parametrize("target", TARGETS)
def test_a_name_switches_its_rule(name, target):
    on, off = options_for(target, enable=[name]), options_for(target, disable=[name])
    assert on.rules == TARGETS[target].rules | {name} and off.rules == TARGETS[target].rules - {name}
    assert options_for(target, fold=True) == options_for(target, enable="fold")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"target": "gpu"}, "target: got 'gpu', expected one of any, cpu, tensorrt, cuda"),
        ({"enable": ["fuse"]}, "enable: got 'fuse', expected one of pool_first"),
        ({"disable": "alone"}, "disable: got 'alone', expected one of pool_first"),
        ({"enable": ["plain_conv"], "disable": ["plain_conv"]}, "disable: got 'plain_conv', which enable names too"),
        ({"lowering": "box"}, "lowering: got 'box', expected one of convavgpool"),
    ],
)
def test_unusable_names(options, message):
    with pytest.raises(OptionError, match=message):
        convpool.optimize(generators.generate("lenet5"), check=0, **options)


def test_options_are_frozen_and_checked():
    with pytest.raises(OptionError, match="rules: got 'nothing'"):
        OptimizeOptions(rules=frozenset({"nothing"}))
    with pytest.raises(AttributeError):
        OptimizeOptions().lowering = "direct"


def test_targets():
    model = generators.generate("sngan64_small")
    found = {target: convpool.optimize(model, check=0, target=target).report for target in TARGETS}
    lowerings = {t: {site.lowering for site in report.sites if site.status == "rewritten"} for t, report in found.items()}
    assert lowerings["any"] == {"convavgpool"} and lowerings["cpu"] <= {"direct", "fused"}
    assert "stem" in {site.pattern for site in found["tensorrt"].sites}
    assert "stem" not in {site.pattern for site in found["any"].sites}


def test_command_line_of_targets_and_rules(tmp_path, capsys):
    path, out = tmp_path / "model.onnx", tmp_path / "out.onnx"
    path.write_bytes(generators.generate("sngan64_small").SerializeToString())

    def written(*options: str) -> bytes:
        assert run(command, "convpool-optimize", [str(path), "-o", str(out), "-q", "--no-check", *options]) == 0
        return out.read_bytes()

    assert written("--target", "cpu") == written("--lowering", "auto")
    assert written("--target", "tensorrt") == written("--enable", "image_conv", "--enable", "plain_conv")
    assert len({written(), written("--enable", "image_conv"), written("--disable", "pool_first")}) == 3
    assert written("--fold") == written("--enable", "fold")
    for options in (["--target", "cpu", "--enable", "image_conv"], ["--lowering", "fused", "--enable", "plain_conv"]):
        assert run(command, "convpool-optimize", [str(path), "-o", str(out), *options]) == 2
        error = capsys.readouterr().err
        assert "too; expected convavgpool" in error and ("--target cpu sets auto" in error) == ("cpu" in options)


def test_the_help_states_the_limits(capsys):
    assert run(command, "convpool-optimize", ["--help"]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert limits.OF_IMAGES in printed and limits.OF_PLAIN_CONVOLUTIONS in printed
    assert "at least 64 channels in multiples of 8; at most 2.5e9" in printed


def test_the_limits_are_those_of_the_documents():
    assert (limits.IMAGE_CHANNELS, limits.FILTER_ELEMENTS, limits.WIDE_CHANNELS, limits.CHANNEL_MULTIPLE) == (4, 64, 64, 8)
    assert (limits.PLAIN_MACS, limits.PLAIN_RESULTS, limits.POOL_CHANNELS) == (2.5e9, 400_000, 1024)
