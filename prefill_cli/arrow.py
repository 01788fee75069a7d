"""Arrow types as this project sees them: what counts as text or a list, and dictionaries and views made plain.

Compute kernels for view types are few, so work is done on plain types; ids and kept columns go back to the type they
came with when they are written.
"""

import pyarrow as pa
import pyarrow.compute as pc


def is_text(kind: pa.DataType) -> bool:
    return any(check(kind) for check in (pa.types.is_string, pa.types.is_large_string, pa.types.is_string_view))


def is_list(kind: pa.DataType) -> bool:
    return any(check(kind) for check in (pa.types.is_list, pa.types.is_large_list, pa.types.is_fixed_size_list))


def is_binary(kind: pa.DataType) -> bool:
    binary = (pa.types.is_binary, pa.types.is_large_binary, pa.types.is_binary_view, pa.types.is_fixed_size_binary)
    return any(check(kind) for check in binary)


def plain_type(kind: pa.DataType) -> pa.DataType:
    """A dictionary's value type; any other type is itself."""
    return kind.value_type if pa.types.is_dictionary(kind) else kind


def working_type(kind: pa.DataType) -> pa.DataType:
    """The type without dictionary, view or extension for which every compute kernel exists."""
    if isinstance(kind, pa.BaseExtensionType):
        kind = kind.storage_type
    kind = plain_type(kind)
    if pa.types.is_string_view(kind):
        return pa.large_string()
    if pa.types.is_binary_view(kind):
        return pa.large_binary()
    if is_list(kind):
        return pa.large_list(working_type(kind.value_type))
    if pa.types.is_struct(kind):
        return pa.struct([field.with_type(working_type(field.type)) for field in kind.fields])
    return kind


def to_working(array: pa.Array) -> pa.Array:
    """The array in its working type. A list of dictionaries is decoded inside."""
    if isinstance(array, pa.ExtensionArray):
        array = array.storage
    if pa.types.is_dictionary(array.type):
        array = array.dictionary_decode()
    if is_list(array.type) and pa.types.is_dictionary(array.type.value_type):
        lists = array.cast(pa.large_list(array.type.value_type))
        values = to_working(pc.list_flatten(lists))
        lengths = pc.fill_null(pc.list_value_length(lists), 0)
        offsets = pa.concat_arrays([pa.array([0], pa.int64()), pc.cumulative_sum(lengths).cast(pa.int64())])
        return pa.LargeListArray.from_arrays(offsets, values, mask=lists.is_null())
    wanted = working_type(array.type)
    return array if array.type == wanted else array.cast(wanted)


def invalid_text(array: pa.Array) -> list[int]:
    """Positions of cells of a text array, or of lists and structs that hold text, whose bytes are not UTF-8."""
    try:
        array.validate(full=True)
    except pa.ArrowInvalid:
        if not is_text(array.type):
            return [i for i in range(len(array)) if not _is_valid(array.take(pa.array([i])))]
        cells = array.cast(pa.large_binary())
        return [i for i, cell in enumerate(cells) if cell.is_valid and not _is_utf8(cell.as_py())]
    return []


def _is_valid(array: pa.Array) -> bool:
    try:
        array.validate(full=True)
    except pa.ArrowInvalid:
        return False
    return True


def _is_utf8(raw: bytes) -> bool:
    try:
        raw.decode()
    except UnicodeDecodeError:
        return False
    return True
