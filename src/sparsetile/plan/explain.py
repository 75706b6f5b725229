"""A plan as text, made from plain data."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["explain"]


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.3f} ms"


def _stage(name: str, text: str, spent: Mapping[str, float]) -> str:
    taken = f", {_milliseconds(spent[name])}" if name in spent else ""
    return f"  {name:9s} {text}{taken}"


def _word(measured: bool, by: str) -> str:
    """How a time was found."""
    if not measured:
        return "predicted"
    return "measured earlier" if by == "kept" else "measured"


def _choice(info: Mapping[str, Any]) -> list[str]:
    """Why this system: every candidate's time, or who asked for it."""
    considered, by, chosen = info.get("considered", {}), info.get("considered_by"), info["system"]
    if by in ("model", "measure", "kept"):
        measured = info.get("measured", ())
        ranked = sorted(considered.items(), key=lambda pair: (pair[0] != chosen, pair[1]))
        lines = []
        for name, seconds in ranked:
            verdict = "chosen" if name == chosen else "slower"
            if seconds < considered[chosen]:  # by a prediction: its kernels are not compiled, say
                verdict = "not timed"
            time = f"{_word(name in measured, by)} {_milliseconds(seconds)} a product"
            lines.append(f"  {name:9s} {verdict}: {time}")
        return lines
    if by == "request":
        return [f"  {chosen:9s} asked for by name"]
    if by == "none":
        return [f"  {chosen:9s} the device's exact system, compared with no other"]
    if by == "only":
        time = f"predicted {_milliseconds(considered[chosen])} a product"
        return [f"  {chosen:9s} the only system that can serve this product: {time}"]
    return []


def _others(info: Mapping[str, Any]) -> list[str]:
    """When the other systems are compared, or why they are not."""
    account = info.get("account")
    if account is None:
        after = info.get("compared_after")
        return [] if after is None else [f"  compared  after {after} products"]
    costs = f"that takes about {account['seconds'] * 1e3:.0f} ms"
    if account["later"] is not None:
        when = f"compared after {account['later']} products"
    elif account["expected"] is not None:
        when = f"not compared for {account['expected']} products"
    else:
        when = "not compared"
    return [f"  others    {when}: {costs}, may save {account['saves'] * 1e6:.1f} us a product"]


def _direct(info: Mapping[str, Any]) -> list[str]:
    """Why there is no schedule, or was none at first."""
    account = info.get("direct")
    if account is None:
        return []
    costs = f"takes about {_milliseconds(account['seconds'])}"
    saves = f"may save {account['saves'] * 1e6:.1f} us a product"
    return [f"  direct    a schedule {costs}, {saves}: not for fewer than {account['later']}"]


def explain(title: str, info: Mapping[str, Any], floor: tuple[float, str]) -> str:
    """Return each stage's choice and cost, every rejected system with its reason, and the floor (on
    a CPU an estimate), of ``Plan.info`` and ``Plan.floor()``.
    """
    spent = info["seconds"]
    lines = [
        title,
        _stage("intake", f"{info['nnz']} entries in canonical CSR", spent),
        _stage("reorder", info["reorder"], spent),
    ]
    lines += [f"  order     {text}" for text in info.get("orders", ())]
    if info["reorder_columns"]:
        lines.append("  columns   as first used in that order: run takes plan.permute(B), not B")
    lines += [f"  {name:9s} {choice}" for name, choice in info["choices"].items()]
    split = ", ".join(f"{name} {_milliseconds(s)}" for name, s in info.get("build", {}).items())
    lines.append(
        f"  build     {_milliseconds(spent.get('build', 0.0))}"
        + (f" ({split})" if split else "")
        + f", {info['format_bytes']} bytes beside the values"
    )
    if "compile" in spent:
        lines.append(f"  compile   {_milliseconds(spent['compile'])}")
    lines += _choice(info)
    lines += [f"  note      {text}" for text in info.get("notes", ())]
    lines += _direct(info)
    lines += _others(info)
    for name, reasons in info.get("rejected", {}).items():
        lines.append(f"  {name:9s} rejected: {'; '.join(reasons)}")
    seconds, term = floor
    if info["device"] == "cpu":  # whose limits are not known well enough to call this a floor
        lines.append(f"  estimate  {_milliseconds(seconds)} a product at best ({term})")
        return "\n".join(lines)
    lines.append(f"  floor     {_milliseconds(seconds)} a product ({term})")
    chosen = info.get("considered", {}).get(info["system"])
    if chosen:
        measured = info["system"] in info.get("measured", ())
        word = _word(True, info["considered_by"]) if measured else "predicted, not measured"
        lines.append(f"  share     {100 * seconds / chosen:.0f} % of the floor's speed, {word}")
    return "\n".join(lines)
