"""Owns what a list of documents means: each is created, or brought to what it says, all of them or none.

Documents may stand in any order; tenants are made before what lies in them. For an object that exists the
spec is replaced, the labels and annotations given are set, and everything else stays.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rezuscloud.model.declaration import is_leaving
from rezuscloud.model.errors import ApiError, BadRequest, Conflict, Forbidden, Invalid
from rezuscloud.model.meta import Doc
from rezuscloud.resources import causes
from rezuscloud.resources.admission import Admission, DropUnknown
from rezuscloud.resources.desk import Desk
from rezuscloud.resources.metadata import merged_metadata
from rezuscloud.resources.registry import REGISTRY, Kind

MAX_DOCUMENTS = 1000

Permit = Callable[[str, Kind, str], None]
"""verb, kind, namespace → raises Forbidden."""


@dataclass(frozen=True)
class _Item:
    place: int
    kind: Kind
    namespace: str
    doc: Doc

    @property
    def label(self) -> str:
        return f"items[{self.place}]"


def apply_documents(
    desk: Desk, admission: Admission, docs: Sequence[Doc], permit: Permit, drop: DropUnknown | None
) -> list[Doc]:
    """The stored documents, in the order given. Raises one error that tells what is wrong in all of them."""
    if len(docs) > MAX_DOCUMENTS:
        raise BadRequest(f"{len(docs)} documents are too many at once; at most {MAX_DOCUMENTS}")
    problems: list[tuple[str, ApiError]] = []
    items: list[_Item] = []
    for place, doc in enumerate(docs):
        try:
            items.append(_item(place, doc))
        except ApiError as error:
            problems.append((f"items[{place}]", error))
    tenants: dict[str, Doc] = {}
    written: dict[int, Doc] = {}
    seen: set[tuple[str, str, str]] = set()
    # Tenants are judged first and written last: their revision covers the groups.
    for item in sorted(items, key=lambda item: item.kind.namespaced):
        try:
            doc = _judge(desk, admission, item, seen, permit, drop, tenants)
        except ApiError as error:
            problems.append((item.label, error))
        else:
            if item.kind.kind == "Tenant":
                tenants[doc["metadata"]["name"]] = written[item.place] = doc
            else:
                written[item.place] = desk.save_or_release(doc)
    if problems:
        raise _all_in_one(problems)
    for item in items:
        if item.kind.kind == "Tenant":
            written[item.place] = desk.save_or_release(written[item.place])
    return [written[place] for place in range(len(docs))]


def _item(place: int, doc: Doc) -> _Item:
    if not isinstance(doc, dict) or not isinstance(doc.get("kind"), str):
        raise BadRequest("a document must be an object with apiVersion, kind, metadata and spec")
    kind = REGISTRY.by_kind(doc["kind"])
    if kind is None:
        known = ", ".join(sorted(kind.kind for kind in REGISTRY if kind.writable == "user"))
        raise BadRequest(f'no kind "{doc["kind"]}" is known; a manifest may hold {known}')
    meta = doc.setdefault("metadata", {})
    if not isinstance(meta, dict):
        raise BadRequest("metadata must be an object")
    if not kind.namespaced:
        return _Item(place, kind, "", doc)
    namespace = meta.get("namespace")
    if not isinstance(namespace, str) or not namespace:
        missing = causes.required(("metadata", "namespace"), "the tenant in which it lies")
        raise Invalid.of(kind.kind, str(meta.get("name", "")), [missing])
    return _Item(place, kind, namespace, doc)


def _judge(
    desk: Desk,
    admission: Admission,
    item: _Item,
    seen: set[tuple[str, str, str]],
    permit: Permit,
    drop: DropUnknown | None,
    tenants: dict[str, Doc],
) -> Doc:
    """The document that is to be written."""
    kind, meta = item.kind, item.doc["metadata"]
    name = meta.get("name")
    current = None
    if isinstance(name, str):
        key = (kind.kind, item.namespace, name)
        if key in seen:
            raise Invalid.of(kind.kind, name, [causes.duplicate(("metadata", "name"), name)])
        seen.add(key)
        current = desk.get(*key)
    if current is None:
        permit("create", kind, item.namespace)
        return admission.new(desk, kind, item.namespace, item.doc, drop, known=tenants)
    permit("update", kind, item.namespace)
    if is_leaving(current):
        raise Conflict(
            f'{kind.plural} "{name}" is being deleted; apply again when it is gone',
            kind=kind.plural,
            name=str(name),
        )
    doc = {**item.doc, "metadata": merged_metadata(current["metadata"], meta)}
    return admission.changed(kind, current, doc, drop)


def _all_in_one(problems: list[tuple[str, ApiError]]) -> ApiError:
    """One error for all documents. What makes the rest pointless comes first."""
    problems.sort(key=lambda problem: int(problem[0][6:-1]))
    ranks: tuple[type[ApiError], ...] = (Forbidden, BadRequest, Invalid)
    for rank in ranks:
        found = [(label, error) for label, error in problems if isinstance(error, rank)]
        if not found:
            continue
        listed = [causes.within(label, cause) for label, error in found for cause in error.causes]
        if listed and rank is BadRequest:
            return BadRequest(causes.strict_decoding_message(listed), causes=listed)
        if listed:
            said = "; ".join(f"{cause.field}: {cause.message}" for cause in listed)
            return Invalid(f"the manifest is invalid, nothing was written: {said}", causes=listed)
        break
    else:
        found = problems
    label, error = found[0]
    return type(error)(f"{label}: {error.message}; nothing was written", kind=error.kind, name=error.name)
