import sys

from lightning_sparse.cli import main

sys.exit(main())
