//! Optimizes a captured graph from a JSON file and prints where the time went.
#![allow(clippy::print_stdout)]

use hypatia_core::ir::{captured::Captured, import};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    for file in std::env::args().skip(1) {
        let captured: Captured = serde_json::from_str(&std::fs::read_to_string(&file)?)?;
        let program = import::import(&captured)?;
        for _ in 0..3 {
            let o = hypatia_core::optimize(&program, &hypatia_core::Options::default())?;
            println!(
                "{file}: {:?} size {:?} cost {:.1} -> {:.1} bound {:.1} by {:?}",
                o.times, o.size, o.cost_before, o.cost_after, o.lower_bound, o.method
            );
        }
    }
    Ok(())
}
