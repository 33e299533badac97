"""Which drafted tokens stand, and what follows them, in three launches."""

from pallas.acceptance.api import judge as judge
from pallas.acceptance.types import Requests as Requests
from pallas.acceptance.types import Seen as Seen
from pallas.acceptance.types import Stands as Stands
