"""Kernel parameters, declared once by name and type.

A kernel takes one struct. Its :class:`ParamStruct` gives the C fields, which the generated header
holds as ``PARAMS_FIELDS``, and packs values by name. The kernel writes

    struct Params {
      PARAMS_FIELDS
    };
    static_assert(PARAMS_LAYOUT_MATCHES, "host and device disagree on the parameter struct");

after the types of the fields; the assertion compares the size and every field.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from operator import itemgetter
from typing import Any

from sparsetile.core.errors import value_error
from sparsetile.jit.tensor_map import MAP_ALIGNMENT, MAP_WORDS

__all__ = [
    "Field", "ParamStruct", "ParamValue", "Patch", "f64", "i32", "i32_array", "i64", "pointer",
    "tensor_map",
]  # fmt: skip

ParamValue = int | float | Sequence[int]


@dataclass(frozen=True)
class Field:
    """One field: ``count`` numbers of one ``struct`` letter."""

    name: str  # its name in C and in Python
    declaration: str  # the C declaration without the semicolon
    comment: str  # what the kernel reads it for
    letter: str  # ``struct`` letter of a number: Q, q, d or i
    alignment: int  # bytes that its offset is a multiple of
    count: int = 1  # numbers in the field; more than one makes its value a sequence

    @property
    def bytes(self) -> int:
        return self.count * struct.calcsize("=" + self.letter)

    @property
    def format(self) -> str:
        return f"{self.count}{self.letter}"

    @property
    def patch_format(self) -> str:
        """As :attr:`format`; several numbers are one value, their bytes."""
        return self.letter if self.count == 1 else f"{self.bytes}s"


def pointer(name: str, c_type: str, comment: str = "") -> Field:
    """Device address; ``c_type`` with its asterisk, such as ``const int4*``."""
    return Field(name, f"{c_type} {name}", comment, "Q", 8)


def i32(name: str, comment: str = "") -> Field:
    return Field(name, f"int {name}", comment, "i", 4)


def i64(name: str, comment: str = "") -> Field:
    return Field(name, f"long long {name}", comment, "q", 8)


def f64(name: str, comment: str = "") -> Field:
    return Field(name, f"double {name}", comment, "d", 8)


def i32_array(name: str, count: int, comment: str = "") -> Field:
    return Field(name, f"int {name}[{count}]", comment, "i", 4, count)


def tensor_map(name: str, comment: str = "") -> Field:
    """A tensor map by value (``TensorMap`` of wgmma.cuh); its value is the 16 words."""
    return Field(name, f"TensorMap {name}", comment, "Q", MAP_ALIGNMENT, MAP_WORDS)


@dataclass(frozen=True)
class Patch:
    """Fields that change from call to call, written in the order of their names.

    ``runs`` are (packer, byte offset, fields): fields that are neighbours in the struct are written
    with one call. A field of several numbers is given as its bytes, which takes a twentieth of the
    time of sixteen numbers.
    """

    runs: tuple[tuple[struct.Struct, int, int], ...]

    def bind(self, buffer: Any) -> Callable[..., None]:
        """Return the fastest function that writes the values into ``buffer``."""
        writers, first = [], 0
        for packer, offset, count in self.runs:
            some = slice(first, first + count)
            writers.append((partial(packer.pack_into, buffer, offset), some))
            first += count
        if len(writers) == 1:
            return writers[0][0]

        def write(*values: int | float | bytes) -> None:
            for pack, some in writers:
                pack(*values[some])

        return write


@dataclass(frozen=True)
class ParamStruct:
    """The only parameter of a kernel, as the device compiler lays it out."""

    fields: tuple[Field, ...]

    @staticmethod
    def of(*fields: Field) -> ParamStruct:
        names = [field.name for field in fields]
        repeated = sorted({name for name in names if names.count(name) > 1})
        if repeated or not fields:
            raise value_error(
                "ParamStruct", "fields", "at least one, each name once",
                f"{', '.join(repeated)} repeatedly" if repeated else "none", "Declare each once",
            )  # fmt: skip
        return ParamStruct(fields)

    @cached_property
    def offsets(self) -> dict[str, int]:
        """Byte offset of each field."""
        found, end = {}, 0
        for field in self.fields:
            found[field.name] = -(-end // field.alignment) * field.alignment
            end = found[field.name] + field.bytes
        return found

    @cached_property
    def size(self) -> int:
        """Bytes of the struct, padded to its alignment."""
        last, alignment = self.fields[-1], max(field.alignment for field in self.fields)
        return -(-(self.offsets[last.name] + last.bytes) // alignment) * alignment

    @cached_property
    def zeros(self) -> dict[str, ParamValue]:
        """Every field as 0, or null."""
        return {field.name: 0 if field.count == 1 else (0,) * field.count for field in self.fields}

    @cached_property
    def _struct(self) -> struct.Struct:
        return self._packer(self.fields, self.size)

    def _packer(self, fields: Sequence[Field], end: int, patch: bool = False) -> struct.Struct:
        """Return the packer of neighbouring fields, padded up to offset ``end``."""
        at = self.offsets[fields[0].name]
        # Native packing is faster. It aligns relative to the first field, which is the same if that
        # field is aligned for all.
        parts = ["@" if at % 8 == 0 else "="]
        for field in fields:
            offset = self.offsets[field.name]
            parts.append(f"{offset - at}x{field.patch_format if patch else field.format}")
            at = offset + field.bytes
        return struct.Struct("".join(parts) + f"{end - at}x")

    @cached_property
    def _names(self) -> frozenset[str]:
        return frozenset(field.name for field in self.fields)

    @cached_property
    def _take(self) -> Callable[[Mapping[str, ParamValue]], Any]:
        names = [field.name for field in self.fields]
        return itemgetter(*names) if len(names) > 1 else lambda values: (values[names[0]],)

    @cached_property
    def _wide(self) -> tuple[int, ...]:
        """Places of the fields that are sequences, last first."""
        return tuple(i for i in reversed(range(len(self.fields))) if self.fields[i].count > 1)

    def pack_into(self, buffer: Any, values: Mapping[str, ParamValue]) -> None:
        """Write every field; ``values`` has each name exactly once."""
        try:
            flat = list(self._take(values))
            if len(values) != len(flat):
                raise self._misnamed(values)
            for place in self._wide:
                flat[place : place + 1] = flat[place]
            self._struct.pack_into(buffer, 0, *flat)
        except KeyError:
            raise self._misnamed(values) from None
        except (struct.error, TypeError):
            raise self._misfit(values) from None

    def _misnamed(self, values: Mapping[str, ParamValue]) -> ValueError:
        missing = ", ".join(f.name for f in self.fields if f.name not in values)
        unknown = ", ".join(name for name in values if name not in self._names)
        return value_error(
            "launch", "params", "a value for each of the kernel's fields",
            f"missing: {missing or 'none'}; unknown: {unknown or 'none'}",
            "Name each field once",
        )  # fmt: skip

    def _misfit(self, values: Mapping[str, ParamValue]) -> ValueError:
        """Return the error of the first value that does not fit its field."""
        for field in self.fields:
            value = values[field.name]
            numbers = value if isinstance(value, Sequence) else (value,)
            try:
                struct.pack("=" + field.format, *numbers)
            except struct.error:
                break
        return value_error(
            "launch", field.name, f"what `{field.declaration}` holds", repr(values[field.name]),
            "Give a number of that type, or as many as it has",
        )  # fmt: skip

    @cached_property
    def _patches(self) -> dict[tuple[str, ...], Patch]:
        return {}

    def patch(self, *names: str) -> Patch:
        """Return the patch of the named fields, in that order; made once, for all launches."""
        found = self._patches.get(names)
        if found is None:
            found = self._patches[names] = self._new_patch(names)
        return found

    def _new_patch(self, names: tuple[str, ...]) -> Patch:
        unknown = [name for name in names if name not in self._names]
        if unknown or not names:
            raise value_error(
                "patch", "names", "fields of the kernel's parameters",
                ", ".join(unknown) or "none", f"Choose from {', '.join(sorted(self._names))}",
            )  # fmt: skip
        place = {field.name: i for i, field in enumerate(self.fields)}
        runs: list[list[Field]] = []
        for name in names:
            field = self.fields[place[name]]
            if runs and place[name] == place[runs[-1][-1].name] + 1:
                runs[-1].append(field)
            else:
                runs.append([field])
        return Patch(
            tuple(
                (
                    self._packer(run, self.offsets[run[-1].name] + run[-1].bytes, patch=True),
                    self.offsets[run[0].name],
                    len(run),
                )
                for run in runs
            )
        )

    def header(self) -> str:
        """Return the lines of the generated header: the fields, and assertions on them."""
        fields = " ".join(f"{field.declaration};" for field in self.fields)
        checks = [f"sizeof(Params) == {self.size}"]
        # Sizes and alignments fix every offset. (NVRTC 13.0 has no offsetof for constants.)
        for field in self.fields:
            kind = f"decltype(Params::{field.name})"
            checks += [f"sizeof({kind}) == {field.bytes}", f"alignof({kind}) == {field.alignment}"]
        return (
            f"#define PARAMS_FIELDS {fields}\n#define PARAMS_LAYOUT_MATCHES {' && '.join(checks)}\n"
        )
