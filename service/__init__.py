"""The service: REST API, SQL queue, scheduler, dispatcher and sweeper. Only this package touches a database."""
