"""Owns how YAML or JSON text becomes documents; the same for the server's commands and for `rezusctl`."""

from __future__ import annotations

from rezuscloud.model.meta import Doc


class DocumentError(ValueError):
    """The text holds no documents that can be used; the message says where."""


def read_documents(text: str) -> list[Doc]:
    """All documents of a text, in order; a List gives its items. Raises DocumentError."""
    import yaml  # slow to import, and most commands read no document

    try:
        loaded = [doc for doc in yaml.load_all(text, Loader=_loader()) if doc is not None]
    except yaml.YAMLError as error:
        raise DocumentError(f"no valid YAML: {error}") from error
    docs: list[Doc] = []
    for doc in loaded:
        items = doc.get("items") or [] if isinstance(doc, dict) and _is_list(doc) else [doc]
        for item in items:
            if not isinstance(item, dict):
                raise DocumentError(f"a document must be an object, not {type(item).__name__}")
            docs.append(item)
    return docs


def _is_list(doc: Doc) -> bool:
    return str(doc.get("kind", "")).endswith("List")


def _loader() -> type:
    """A SafeLoader that leaves times as the text they are: a resource holds no other type for them."""
    import yaml

    class Loader(yaml.SafeLoader):
        pass

    Loader.yaml_implicit_resolvers = {
        first: [(tag, pattern) for tag, pattern in resolvers if not tag.endswith(":timestamp")]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }
    return Loader
