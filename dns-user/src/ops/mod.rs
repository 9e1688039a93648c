//! What an operator touches: API, metrics, logs, status.
