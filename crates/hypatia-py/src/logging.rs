//! Events of `tracing` for Python's `logging`, under the logger `hypatia` and the module they come from.
//!
//! Rust code runs without the GIL, on threads of its own, and may hold a lock when it says something. Waiting for the GIL
//! there could wait forever, for a thread that has the GIL and waits for the lock. So events are collected, and whoever
//! called from Python hands them over once it has the GIL again.

use std::fmt::{Debug, Write};
use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::{Mutex, PoisonError};

use pyo3::intern;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use tracing::field::{Field, Visit};
use tracing::subscriber::Interest;
use tracing::{Event, Level, Metadata, Subscriber, span};

use crate::guarded;

/// Python's level of what is collected at least, as it was when a call from Python began.
static LEVEL: AtomicU8 = AtomicU8::new(u8::MAX);
static COLLECTED: Mutex<Vec<Record>> = Mutex::new(vec![]);
/// More than this is dropped: something that nobody fetches must not grow forever.
const MOST: usize = 10_000;
/// Loggers of the crates. The levels of loggers below them count as well, but cannot ask for more.
const LOGGERS: [&str; 3] = ["hypatia.core", "hypatia.runtime", "hypatia.cuda"];

struct Record {
    logger: String,
    level: u8,
    text: String,
}

/// As [`guarded`], for code that says what it does.
pub fn logged<T: Send>(py: Python<'_>, f: impl FnOnce() -> PyResult<T> + Send) -> PyResult<T> {
    LEVEL.store(least_level(py)?, Ordering::Relaxed);
    let result = guarded(py, f);
    hand_over(py)?;
    result
}

/// Collects events of this process from now on.
pub fn start() {
    // Another one is there if the module is imported again; it serves as well.
    let _ = tracing::subscriber::set_global_default(Collector);
}

/// The lowest level that one of the loggers is enabled for.
fn least_level(py: Python<'_>) -> PyResult<u8> {
    static ENABLED: PyOnceLock<Vec<Py<PyAny>>> = PyOnceLock::new();
    let checks = ENABLED.get_or_try_init(py, || {
        let find = |name| logger(py, name)?.getattr("isEnabledFor").map(Bound::unbind);
        LOGGERS.into_iter().map(find).collect::<PyResult<_>>()
    })?;
    for level in [10, 20, 30, 40] {
        for check in checks {
            if check.call1(py, (level,))?.extract(py)? {
                return Ok(level);
            }
        }
    }
    Ok(u8::MAX)
}

fn logger<'py>(py: Python<'py>, name: &str) -> PyResult<Bound<'py, PyAny>> {
    py.import(intern!(py, "logging"))?
        .call_method1(intern!(py, "getLogger"), (name,))
}

fn hand_over(py: Python<'_>) -> PyResult<()> {
    let collected = std::mem::take(&mut *COLLECTED.lock().unwrap_or_else(PoisonError::into_inner));
    for record in collected {
        logger(py, &record.logger)?.call_method1(intern!(py, "log"), (record.level, record.text))?;
    }
    Ok(())
}

fn python_level(level: Level) -> u8 {
    match level {
        Level::ERROR => 40,
        Level::WARN => 30,
        Level::INFO => 20,
        Level::DEBUG => 10,
        Level::TRACE => 5,
    }
}

struct Collector;

impl Subscriber for Collector {
    /// Levels change: each event asks anew.
    fn register_callsite(&self, about: &'static Metadata<'static>) -> Interest {
        if about.target().starts_with("hypatia_") {
            Interest::sometimes()
        } else {
            Interest::never()
        }
    }

    fn enabled(&self, about: &Metadata<'_>) -> bool {
        about.is_event() && python_level(*about.level()) >= LEVEL.load(Ordering::Relaxed)
    }

    fn event(&self, event: &Event<'_>) {
        let mut text = Text::default();
        event.record(&mut text);
        let about = event.metadata();
        let record = Record {
            logger: about.target().replacen('_', ".", 1).replace("::", "."),
            level: python_level(*about.level()),
            text: text.message + &text.fields,
        };
        let mut collected = COLLECTED.lock().unwrap_or_else(PoisonError::into_inner);
        if collected.len() < MOST {
            collected.push(record);
        }
    }

    // There are no spans.
    fn new_span(&self, _: &span::Attributes<'_>) -> span::Id {
        span::Id::from_u64(1)
    }

    fn record(&self, _: &span::Id, _: &span::Record<'_>) {}

    fn record_follows_from(&self, _: &span::Id, _: &span::Id) {}

    fn enter(&self, _: &span::Id) {}

    fn exit(&self, _: &span::Id) {}
}

/// The message of an event, and its fields behind it.
#[derive(Default)]
struct Text {
    message: String,
    fields: String,
}

impl Visit for Text {
    fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
        // Writing to a string does not fail.
        let _ = match field.name() {
            "message" => write!(self.message, "{value:?}"),
            name => write!(self.fields, " {name}={value:?}"),
        };
    }

    fn record_str(&mut self, field: &Field, value: &str) {
        self.record_debug(field, &format_args!("{value}"));
    }

    fn record_f64(&mut self, field: &Field, value: f64) {
        self.record_debug(field, &format_args!("{value:.1}"));
    }
}
