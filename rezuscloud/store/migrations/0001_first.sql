CREATE TABLE objects (
    kind      TEXT NOT NULL,
    namespace TEXT NOT NULL,
    name      TEXT NOT NULL,
    doc       BLOB NOT NULL,
    PRIMARY KEY (kind, namespace, name)
) WITHOUT ROWID;

CREATE TABLE changes (
    version INTEGER PRIMARY KEY AUTOINCREMENT,
    type    TEXT NOT NULL,
    doc     BLOB NOT NULL
);

CREATE TABLE states (
    tenant_uid TEXT    NOT NULL,
    version    INTEGER NOT NULL,
    meta       BLOB    NOT NULL,
    body       BLOB    NOT NULL,
    PRIMARY KEY (tenant_uid, version)
);

CREATE TABLE records (
    key   TEXT PRIMARY KEY,
    value BLOB NOT NULL
) WITHOUT ROWID;
