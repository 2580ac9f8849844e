"""JSON schemas, made ready to be compiled into a grammar.

A schema is walked as a schema: only where JSON Schema has subschemas. Constants, defaults and
examples are values, whatever they look like, and a property may be named like a keyword.
"""

import json
from collections import defaultdict
from collections.abc import Iterator
from typing import Any
from urllib.parse import unquote, urldefrag, urljoin

from ..errors import InvalidRequestError

Schema = dict[str, Any]

# Keywords by what is below them: one schema, a list of schemas, or schemas by name.
_WITH_ONE = frozenset(
    [
        "additionalItems",
        "additionalProperties",
        "contains",
        "contentSchema",
        "else",
        "if",
        "items",
        "not",
        "propertyNames",
        "then",
        "unevaluatedItems",
        "unevaluatedProperties",
    ]
)
_WITH_A_LIST = frozenset(["allOf", "anyOf", "items", "oneOf", "prefixItems"])
_WITH_NAMES = frozenset(
    ["$defs", "definitions", "dependencies", "dependentSchemas", "patternProperties", "properties"]
)
# Schemas that apply only where a reference leads to them.
_DEFINITIONS = frozenset(("$defs", "definitions"))
# Keywords whose schemas describe the same value as the schema that has them.
_ABOUT_THE_SAME_VALUE = frozenset(
    ["allOf", "anyOf", "dependencies", "dependentSchemas", "else", "if", "not", "oneOf", "then"]
)
# Formats that llguidance enforces. A format is an annotation: one that is not known here has no
# effect.
_KNOWN_FORMATS = frozenset(
    ["date", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "time", "uri", "uuid"]
)


def prepared(json_schema: str) -> Schema:
    """Return a schema that is ready to be compiled.

    Objects have only the properties that their schema names, unless it sets
    ``additionalProperties``: OpenAI's strict schemas require this of every object, and vLLM assumes
    it of all schemas; else a weak model adds one property after the other. This does not apply to
    objects that several schemas describe together, as with ``allOf`` or a reference beside
    ``properties``, because none of these schemas names all properties. Unknown formats are removed.

    Raises:
        InvalidRequestError: it is not a schema, allows no value, or has references that lead back
            to themselves without an end.
        RecursionError: it is too deep.
    """
    root = json.loads(json_schema)
    if root is True:
        return {}
    if root is False:
        raise InvalidRequestError("the schema false allows no answer")
    if not isinstance(root, dict):
        raise InvalidRequestError("a schema must be an object or true")
    references = _References(root)
    schemas, shared = _applied(root, references)
    _require_an_end(schemas, references)
    for key, (schema, _) in schemas.items():
        if isinstance(schema.get("format"), str) and schema["format"] not in _KNOWN_FORMATS:
            del schema["format"]
        names_properties = isinstance(schema.get("properties"), dict) and "type" in schema
        if names_properties and key not in shared:
            schema.setdefault("additionalProperties", False)
    return root


def fixed_texts(json_schema: str) -> Iterator[str]:
    """Yield the texts that a schema prescribes: in constants, and as the names of properties."""
    root = json.loads(json_schema)
    if not isinstance(root, dict):
        return
    schemas, _ = _applied(root, _References(root))
    for schema, _ in schemas.values():
        values = [schema.get("const"), schema.get("enum"), schema.get("required")]
        properties = schema.get("properties")
        if isinstance(properties, dict):
            values += properties.keys()
        while values:
            value = values.pop()
            if isinstance(value, str):
                yield value
            elif isinstance(value, list):
                values += value
            elif isinstance(value, dict):
                values += value.keys()
                values += value.values()


def _below(schema: Schema) -> Iterator[tuple[str, str, Schema]]:
    """Yield each subschema that is an object, with its keyword and its place below the schema."""
    for keyword, value in schema.items():
        if keyword in _WITH_NAMES and isinstance(value, dict):
            for name, part in value.items():
                if isinstance(part, dict):
                    yield keyword, f"{keyword}/{name}", part
        elif keyword in _WITH_A_LIST and isinstance(value, list):
            for number, part in enumerate(value):
                if isinstance(part, dict):
                    yield keyword, f"{keyword}/{number}", part
        elif keyword in _WITH_ONE and isinstance(value, dict):
            yield keyword, keyword, value


class _References:
    """Finds the schemas that the references in a schema lead to.

    Args:
        root: the whole schema.
    """

    def __init__(self, root: Schema):
        self._root = root
        self._base = _text(root.get("$id"))
        self._named: dict[str, Schema] = {}  # by identifier, or by anchor
        schemas = [root]
        while schemas:
            schema = schemas.pop()
            identifier = _text(schema.get("$id"))
            if identifier:
                self._named[urljoin(self._base, identifier)] = schema
            anchor = _text(schema.get("$anchor"))
            if anchor:
                self._named[f"#{anchor}"] = schema
            schemas += [part for _, _, part in _below(schema)]

    def target(self, schema: Schema) -> Schema | None:
        """Return the schema that another refers to; None if there is none, or it is not found."""
        if not isinstance(schema.get("$ref"), str):
            return None
        url, fragment = urldefrag(urljoin(self._base, schema["$ref"]))
        is_here = url in ("", urldefrag(self._base).url)
        resource = self._root if is_here else self._named.get(url)
        if resource is None or not fragment:
            return resource
        if not fragment.startswith("/"):
            return self._named.get(f"#{fragment}")
        # The fragment is a JSON pointer: follow it.
        value = resource
        for step in unquote(fragment).split("/")[1:]:
            name = step.replace("~1", "/").replace("~0", "~")
            if isinstance(value, list) and name.isdecimal() and int(name) < len(value):
                value = value[int(name)]
            elif isinstance(value, dict) and name in value:
                value = value[name]
            else:
                return None
        return value if isinstance(value, dict) else None


def _text(value: Any) -> str:
    """Return a value if it is a text, else an empty one."""
    return value if isinstance(value, str) else ""


def _applied(
    root: Schema, references: _References
) -> tuple[dict[int, tuple[Schema, str]], set[int]]:
    """Find all schemas that apply, also those that only a reference leads to.

    Returns:
        Each schema and its place, by the schema's identity; and the identities of the schemas that
        describe a value, or something inside it, together with others.
    """
    schemas: dict[int, tuple[Schema, str]] = {}
    shared: set[int] = set()
    waiting = [(root, "#", False)]
    while waiting:
        schema, place, is_shared = waiting.pop()
        is_shared = is_shared or _shares_its_value(schema)
        # A schema that is reached again is walked again only to pass on that its value is shared.
        is_newly_shared = is_shared and id(schema) not in shared
        if id(schema) in schemas and not is_newly_shared:
            continue
        schemas.setdefault(id(schema), (schema, place))
        if is_shared:
            shared.add(id(schema))
        for keyword, where, part in _below(schema):
            waiting.append((part, f"{place}/{where}", is_shared and keyword not in _DEFINITIONS))
        target = references.target(schema)
        if target is not None:
            waiting.append((target, schema["$ref"], is_shared))
    return schemas, shared


def _shares_its_value(schema: Schema) -> bool:
    """Return whether other schemas may name properties of the same object as this one."""
    if "allOf" in schema:
        return True
    if "properties" not in schema:
        return False
    if "$ref" in schema:
        return True
    naming_keywords = {"properties", "$ref", *_ABOUT_THE_SAME_VALUE}
    for keyword, _, part in _below(schema):
        if keyword in _ABOUT_THE_SAME_VALUE and part.keys() & naming_keywords:
            return True
    return False


def _require_an_end(schemas: dict[int, tuple[Schema, str]], references: _References) -> None:
    """Reject schemas that have no finite value.

    Their references lead back to themselves whatever a value contains.

    Raises:
        InvalidRequestError: there is such a schema; the message names its place.
    """
    needs = {key: _needs(schema, references) for key, (schema, _) in schemas.items()}
    needed_by = defaultdict(list)
    for key, groups in needs.items():
        for group in groups:
            for alternative in group:
                needed_by[alternative].append(key)
    # Schemas that need nothing have an end, then those that need only such schemas, and so on.
    ending: set[int] = set()
    waiting = list(schemas)
    while waiting:
        key = waiting.pop()
        if key in ending:
            continue
        is_endless_yet = any(ending.isdisjoint(group) for group in needs[key])
        if not is_endless_yet:
            ending.add(key)
            waiting += needed_by[key]
    endless = [place for key, (_, place) in schemas.items() if key not in ending]
    if endless:
        raise InvalidRequestError(
            f"its references lead back to themselves without an end, at {endless[0]:.200}"
        )


def _needs(schema: Schema, references: _References) -> list[list[int]]:
    """Return groups of schemas of which a value of a schema needs one each.

    Returns:
        Groups, by the schemas' identity: the value contains a value of one schema of each group.
    """
    groups = []
    for part in _list(schema.get("allOf")):
        groups.append([part])
    for keyword in ("anyOf", "oneOf"):
        if _list(schema.get(keyword)):
            groups.append(schema[keyword])
    target = references.target(schema)
    if target is not None:
        groups.append([target])
    kind = schema.get("type")
    properties = schema.get("properties")
    if kind in ("object", ["object"]) and isinstance(properties, dict):
        for name in _list(schema.get("required")):
            if isinstance(name, str) and name in properties:
                groups.append([properties[name]])
    min_items = schema.get("minItems")
    if kind in ("array", ["array"]) and isinstance(min_items, int | float):
        prefix = _list(schema.get("prefixItems"))
        for number, part in enumerate(prefix):
            if number < min_items:
                groups.append([part])
        if min_items > len(prefix) and "items" in schema:
            groups.append([schema["items"]])
    identities = []
    for group in groups:
        # Anything but an object, such as true, has an end or is rejected elsewhere.
        if all(isinstance(part, dict) for part in group):
            identities.append([id(part) for part in group])
    return identities


def _list(value: Any) -> list[Any]:
    """Return a value if it is a list, else an empty one."""
    return value if isinstance(value, list) else []
