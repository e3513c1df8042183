"""Ctrl-C comes between two steps, not inside one; a second Ctrl-C does not wait."""

from __future__ import annotations

import signal

import pytest

from gangline.cli.interrupts import HeldInterrupts


def test_an_interrupt_inside_a_step_is_raised_after_it() -> None:
    steps = []

    with pytest.raises(KeyboardInterrupt), HeldInterrupts() as interrupts:
        for step in range(3):
            with interrupts.held():
                signal.raise_signal(signal.SIGINT)
                steps.append(step)

    assert steps == [0]


def test_a_second_interrupt_does_not_wait() -> None:
    is_finished = False

    with pytest.raises(KeyboardInterrupt), HeldInterrupts() as interrupts, interrupts.held():
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        is_finished = True

    assert not is_finished


def test_between_steps_it_is_raised_at_once_and_afterwards_the_old_handler_is_back() -> None:
    before = signal.getsignal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt), HeldInterrupts():
        signal.raise_signal(signal.SIGINT)

    assert signal.getsignal(signal.SIGINT) is before
