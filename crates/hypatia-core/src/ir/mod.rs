//! Programs: how they come in, what they hold, how they are written.

pub mod build;
pub mod captured;
pub mod define;
pub mod expand;
pub mod functions;
pub mod import;
pub mod kept;
pub mod node;
pub mod program;
pub mod text;
