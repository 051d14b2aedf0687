"""python -m railrelay.client.cli"""

import sys

from railrelay.client.cli import main

sys.exit(main())
