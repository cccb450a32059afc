"""Torch's threads must wait without spinning here, as in `refold.gpu.factory`: tests run beside others on few cores."""

import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
