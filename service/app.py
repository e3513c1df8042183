"""Build the app: settings in, FastAPI out. Opens the database; starts the control threads where told."""

from __future__ import annotations

import importlib.metadata
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI

from service.api import (
    agent,
    bundles,
    health,
    history,
    identity,
    job_actions,
    job_turn,
    jobs,
    logs,
    metrics,
    nodes,
    overview,
    queue,
    quotas,
    usage,
    why,
)
from service.api.deps import AppState
from service.api.middleware import Envelope
from service.api.problems import install_problem_handlers
from service.auth.principals import PrincipalCache
from service.background import BackgroundThread
from service.control import ControlThreads
from service.db.migrate import migrate
from service.db.pool import load_or_make_pool_id
from service.db.session import Database
from service.events.bus import Bus
from service.events.dispatcher import HintHealth
from service.events.listen import PostgresWakeups
from service.folder import prepare_data_folder
from service.operations.api_presence import ApiPresence
from service.operations.commit_submissions import SubmissionCommitter
from service.operations.submit_job import PoolShapes
from service.scheduler.held_world import HeldWorld
from service.settings import Settings
from service.storage.bundles import BundleFiles
from service.storage.streams import StreamFiles

log = logging.getLogger("gangline")
ROUTERS = (
    health.router,
    identity.router,
    logs.router,
    metrics.router,
    jobs.router,
    job_actions.router,
    job_turn.router,
    quotas.router,
    history.router,
    nodes.router,
    overview.router,
    queue.router,
    why.router,
    usage.router,
    bundles.router,
    agent.router,
)


def version() -> str:
    """The installed version of Gangline."""
    return importlib.metadata.version("gangline")


def create_state(settings: Settings) -> AppState:
    """Open everything the app needs. Raises SettingsError when the folder or the database cannot be used."""
    prepare_data_folder(settings)
    bus = Bus()
    database = Database(settings.resolved_database_url, synchronous=settings.sqlite_synchronous, publish=bus.publish)
    migrate(database)
    return AppState(
        settings=settings,
        database=database,
        bus=bus,
        principals=PrincipalCache(database),
        shapes=PoolShapes(database),
        committer=SubmissionCommitter(database),
        streams=StreamFiles(settings.data_folder),
        bundles=BundleFiles(settings.data_folder),
        pool_id=load_or_make_pool_id(database),
        hints=HintHealth(),
        held=HeldWorld(database, settings),
        version=version(),
    )


def create_app(state: AppState) -> FastAPI:
    """The app over an opened state; its lifespan runs the control threads and closes the database."""

    @asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
        threads: list[BackgroundThread] = []
        if state.settings.run_scheduler:
            threads.append(ControlThreads(state.database, state.settings, state.bus, state.hints, state.held))
        if not state.database.is_sqlite:
            threads.append(PostgresWakeups(state.settings.resolved_database_url, state.bus))
            threads.append(ApiPresence(state.database, state.settings.sweep_seconds))
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            state.bus.close()
            for thread in threads:
                thread.stop()
            state.database.dispose()

    # The bundled pages of docs load from elsewhere; the schema of the API needs a token like everything else.
    app = FastAPI(
        title="Gangline",
        version=state.version,
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
        openapi_url=None,
        # Nothing collects it here, and looking for a collector costs every request.
        telemetry={"tracing": False, "metrics": False, "logs": False},
    )
    app.state.gangline = state
    install_problem_handlers(app)
    for router in ROUTERS:
        app.include_router(router)
    app.add_middleware(
        Envelope,
        body_limit_bytes=state.settings.body_limit_bytes,
        bundle_limit_bytes=state.settings.bundle_limit_bytes,
        version=state.version,
    )
    return app
