"""Evidence that somebody has tampered with."""

import json

import numpy as np

from patchcert.evidence import Evidence


def forge(file, change):
    """Writes what `change` makes of the columns of a file, past every check."""
    restate(file, lambda columns, _: change(columns))


def restate(file, change):
    """Writes what `change` makes of the columns and the meta of a file, past every check."""
    found = Evidence.read(file)
    columns = {name: column.copy() for name, column in found.columns.items()}
    meta = json.loads(json.dumps(found.meta))
    change(columns, meta)
    np.savez_compressed(file, meta=np.array(json.dumps(meta)), **columns)
