"""The optional compiled core, and README without links to what only a checkout has; the rest is in setup.cfg.

KAFKA_MARSHAL_COMPILE=1 pip install .

compiles the hot modules of `rationalizer` from the same source (mypyc; needs a C compiler). It replays a log about
half again as fast; nothing else changes. Without the variable the package is pure Python.
"""

import os
import re
from pathlib import Path

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

#: An index has this file alone: there a relative link or picture leads nowhere.
README = re.sub(r"!?\[([^]]*)\]\((?!https?://)[^)]+\)", r"\1", Path(__file__).with_name("README.md").read_text("utf-8"))
ABOUT = {"long_description": README, "long_description_content_type": "text/markdown"}

if os.environ.get("KAFKA_MARSHAL_COMPILE") == "1":
    try:
        from mypyc.build import mypycify
    except ImportError:  # the build's first pass, which only asks what it needs
        setup(**ABOUT, setup_requires=["mypy>=1.14", "xxhash"])  # its types are read, too
    else:
        sources = [f"rationalizer/{name}.py" for name in HOT]
        setup(
            **ABOUT,
            ext_modules=mypycify(
                ["--ignore-missing-imports", *sources], opt_level=os.environ.get("KAFKA_MARSHAL_OPT_LEVEL", "3")
            ),
        )
else:
    setup(**ABOUT)
