"""Every thread gets its context once."""

from __future__ import annotations

import threading

import torch

from sparsetile.jit import loader as cuda_context


def test_each_thread_and_device_is_entered_once(monkeypatch):
    calls: list[tuple[int, str]] = []
    monkeypatch.setattr(cuda_context, "_entered", cuda_context._Entered())
    monkeypatch.setattr(
        torch, "zeros", lambda size, device: calls.append((threading.get_ident(), device))
    )

    def work() -> None:
        for device in (0, 1, 0, 1):
            cuda_context.ensure_cuda_context(device)

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
        thread.join()
    assert [device for _, device in calls] == ["cuda:0", "cuda:1"] * 2
