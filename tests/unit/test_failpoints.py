"""Failpoints: nothing unless armed, and only by names that there are."""

from __future__ import annotations

import errno
from collections.abc import Iterator

import pytest

from mooncaked.failpoints import arm, arm_from_environment, disarm, failpoint

NAME = "ssd.commit.before_sync"


@pytest.fixture(autouse=True)
def nothing_stays_armed() -> Iterator[None]:
    yield
    disarm()


def test_nothing_happens_unless_armed() -> None:
    failpoint(NAME)
    arm(NAME, "eio")
    failpoint("ssd.commit.before_write")
    with pytest.raises(OSError, match="Input/output error"):
        failpoint(NAME)
    disarm()
    failpoint(NAME)


def test_the_environment_arms_several_from_a_count_on() -> None:
    arm_from_environment({"MOONCAKE_FAILPOINTS": f"{NAME}=enospc@3, ssd.commit.before_write=erofs"})
    failpoint(NAME)
    failpoint(NAME)
    for _ in range(2):
        with pytest.raises(OSError, match="No space") as raised:
            failpoint(NAME)
        assert raised.value.errno == errno.ENOSPC
    with pytest.raises(OSError, match="Read-only"):
        failpoint("ssd.commit.before_write")
    arm_from_environment({})


@pytest.mark.parametrize("text", ["nonsense=eio", f"{NAME}=explode", NAME, f"{NAME}=eio@x", f"{NAME}=path"])
def test_what_makes_no_sense_is_refused(text: str) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 - the message names whatever was wrong
        arm_from_environment({"MOONCAKE_FAILPOINTS": text})
