"""The scheduling process of a cluster: `python -P -m service.schedule`, PostgreSQL only. Several may run; one leads."""

from __future__ import annotations

import logging
import signal
import sys
import threading

from service.control import ControlThreads
from service.db.migrate import migrate
from service.db.session import Database
from service.errors import SettingsError
from service.events.bus import Bus
from service.events.dispatcher import HintHealth
from service.events.listen import PostgresWakeups
from service.settings import settings_from_process_environment


def main() -> int:
    """Run until stopped. Exit code 2: refused to start."""
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    bus = Bus()
    try:
        settings = settings_from_process_environment()
        database = Database(settings.resolved_database_url, publish=bus.publish)
        if database.is_sqlite:
            raise SettingsError("a scheduling process of its own needs PostgreSQL: set database_url.")
        migrate(database)
    except SettingsError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    stopping = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stopping.set())
    wakeups = PostgresWakeups(settings.resolved_database_url, bus)
    control = ControlThreads(database, settings, bus, HintHealth())
    wakeups.start()
    control.start()
    stopping.wait()
    control.stop()
    wakeups.stop()
    database.dispose()
    return 0


if __name__ == "__main__":
    sys.exit(main())
