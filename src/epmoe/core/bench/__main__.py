"""`python -m epmoe.core.bench`: as `epmoe bench`, where no console script is installed."""

import sys

from epmoe.core.cli import main

if __name__ == "__main__":
    sys.argv[1:1] = ["bench"]
    main()
