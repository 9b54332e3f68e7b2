"""Only for the optional compiled core; everything else about the package is in setup.cfg.

KAFKA_MARSHAL_COMPILE=1 pip install .

compiles the hot modules of `rationalizer` from the same source (mypyc; needs a C compiler). It replays a log about
half again as fast; nothing else changes. Without the variable the package is pure Python.
"""

import os

from setuptools import setup

#: What a replay spends its time in. The record classes stay as they are: mypyc has no slotted dataclasses.
HOT = [
    "intervals",
    "leases/lease",
    "leases/machine",
    "progress",
    "wire/codec",
    "wire/wellformed",
    "world",
]

if os.environ.get("KAFKA_MARSHAL_COMPILE") == "1":
    try:
        from mypyc.build import mypycify
    except ImportError:  # the build's first pass, which only asks what it needs
        setup(setup_requires=["mypy>=1.14", "xxhash"])  # its types are read, too
    else:
        sources = [f"rationalizer/{name}.py" for name in HOT]
        setup(
            ext_modules=mypycify(
                ["--ignore-missing-imports", *sources], opt_level=os.environ.get("KAFKA_MARSHAL_OPT_LEVEL", "3")
            )
        )
else:
    setup()
