"""`python -m serving`: the gRPC service."""

import sys

from serving.service.program import main

if __name__ == "__main__":
    sys.exit(main())
