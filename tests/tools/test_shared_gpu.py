"""Processes that share a GPU by MPS: what its daemon is asked, and what happens without one."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest
from tools.shared_gpu import MPS, is_shared, shared_gpu

from tools import shared_gpu as shared_gpu_module

# Answers as the daemon does; writes down what it was asked and where.
_DAEMON = """#!/bin/sh
asked=${{1:-$(cat)}}
echo "$asked $CUDA_MPS_PIPE_DIRECTORY" >> {log}
test "$asked" = -d || {first}
test "$asked" = get_server_list && echo {answer}
exit 0
"""


@pytest.fixture
def daemon(tmp_path: Path, environment):
    """A daemon with an answer; returns a reader of what it was asked."""

    def install(answer: str, first: str = "true") -> Path:
        log, program = tmp_path / "log", tmp_path / MPS
        program.write_text(_DAEMON.format(log=log, answer=answer, first=first))
        program.chmod(program.stat().st_mode | stat.S_IXUSR)
        environment(
            PATH=f"{tmp_path}{os.pathsep}{os.environ['PATH']}", CUDA_MPS_PIPE_DIRECTORY=None
        )
        return log

    return install


@pytest.mark.parametrize("answer, shared", [("4711", True), ("", False)])
def test_the_daemon_runs_in_a_folder_of_its_own_while_processes_do(daemon, answer, shared):
    log = daemon(answer)
    with shared_gpu() as around:
        place = around["CUDA_MPS_PIPE_DIRECTORY"]
        assert Path(place).is_dir() and around["PATH"] == os.environ["PATH"]
        assert is_shared(around) is shared, "the daemon has a server once a process has asked"
    asked = [line.split() for line in log.read_text().splitlines()]
    assert asked == [["-d", place], ["get_server_list", place], ["quit", place]]
    assert not Path(place).exists()


def test_a_daemon_that_does_not_answer_does_not_stop_the_run(daemon, constants):
    daemon("1", first="exec sleep 30")
    constants(shared_gpu_module, _ANSWER_SECONDS=0.5)
    with shared_gpu() as around:
        assert not is_shared(around)


def test_a_daemon_that_runs_already_is_used_as_it_is(daemon, environment, tmp_path):
    log = daemon("1")
    environment(CUDA_MPS_PIPE_DIRECTORY=tmp_path)
    with shared_gpu() as around:
        assert around["CUDA_MPS_PIPE_DIRECTORY"] == str(tmp_path)
    assert not log.exists()


def test_without_its_program_processes_take_turns(environment, tmp_path):
    environment(PATH=tmp_path, CUDA_MPS_PIPE_DIRECTORY=None)
    with shared_gpu() as around:
        assert "CUDA_MPS_PIPE_DIRECTORY" not in around and not is_shared(around)
