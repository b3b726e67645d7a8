"""How a script of the recipe ends."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import NoReturn

from dspark_trt.errors import EXIT_OK, DSparkError


def run_script(main: Callable[[], None]) -> NoReturn:
    """Exit with the code of the package's command line, and with one message where the user can help."""
    try:
        main()
    except DSparkError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    sys.exit(EXIT_OK)
