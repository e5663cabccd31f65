"""Evidence that somebody has tampered with."""

import json

import numpy as np

from patchcert.evidence import Evidence


def forge(file, change):
    """Writes what `change` makes of the columns of a file, past every check."""
    found = Evidence.read(file)
    columns = {name: column.copy() for name, column in found.columns.items()}
    change(columns)
    np.savez_compressed(file, meta=np.array(json.dumps(found.meta)), **columns)
