//! Optimizes a program given as text: no Python, no torch.
#![allow(clippy::print_stdout, clippy::print_stderr)]

use std::io::{Read, Write};
use std::path::PathBuf;
use std::process::ExitCode;

use clap::Parser;
use hypatia_core::cost::Target;
use hypatia_core::ir::text::{self, Weights};
use hypatia_core::{Optimized, Options, optimize};

/// Optimizes a tensor program by equality saturation.
///
/// The program is an s-expression; inputs carry their shapes:
///
///   echo '(relu (linear w:[512,784] b:[512] x:[64,784]))' | hypatia-opt
///
/// Inputs whose names start with w or b count as frozen weights (see --live).
///
/// The exit code is 0, 1 if a proof that was asked for does not hold, 2 if the program cannot be read or optimized.
#[derive(Parser)]
#[command(name = "hypatia", version, verbatim_doc_comment)]
struct Cli {
    /// File with the program; standard input if absent or '-'
    file: Option<PathBuf>,
    /// Print the proof, step by step, and check it again in float64
    #[arg(long)]
    explain: bool,
    /// Machine to optimize for: cpu, h200 or gpu
    #[arg(long, default_value = "cpu")]
    target: String,
    /// No input is a frozen weight
    #[arg(long)]
    live: bool,
    /// Limit on the number of nodes that the search may add
    #[arg(long, default_value_t = 20_000)]
    nodes: usize,
}

/// Stack of the compiler: long programs are walked deeply.
const STACK: usize = 256 << 20;
/// Work of a step of a proof that is evaluated, in operations.
const BUDGET: f64 = 1e9;
/// Exit codes of mistakes in what was given, of proofs that do not hold, and of the compiler itself.
const MISTAKE: u8 = 2;
const BROKEN: u8 = 1;
const INTERNAL: u8 = 70;

fn main() -> ExitCode {
    let cli = Cli::parse();
    std::panic::set_hook(Box::new(|_| {}));
    let worker = std::thread::Builder::new().stack_size(STACK);
    let (code, message) = match worker.spawn(move || run(&cli)).map(|worker| worker.join()) {
        Ok(Ok(Ok((text, holds)))) => return printed(&text, holds),
        Ok(Ok(Err(message))) => (MISTAKE, message),
        Ok(Err(panic)) => {
            let said = (panic.downcast_ref::<String>().map(String::as_str)).or_else(|| panic.downcast_ref().copied());
            (
                INTERNAL,
                format!("internal error: {}", said.unwrap_or("no reason given")),
            )
        }
        Err(error) => (INTERNAL, error.to_string()),
    };
    eprintln!("hypatia-opt: {message}");
    ExitCode::from(code)
}

/// A reader that has gone away is no error.
fn printed(text: &str, holds: bool) -> ExitCode {
    match std::io::stdout().write_all(text.as_bytes()) {
        Err(error) if error.kind() != std::io::ErrorKind::BrokenPipe => {
            eprintln!("hypatia-opt: {error}");
            ExitCode::from(MISTAKE)
        }
        _ if holds => ExitCode::SUCCESS,
        _ => ExitCode::from(BROKEN),
    }
}

/// What to print, and whether the proof holds, if it was asked for.
fn run(cli: &Cli) -> Result<(String, bool), String> {
    let (name, source) = read(cli)?;
    let weights = if cli.live { Weights::Live } else { Weights::Frozen };
    let program = text::parse(&source, weights).map_err(|e| format!("{name}:{e}"))?;
    let names: Vec<String> = Target::all().map(|t| t.name).into();
    let mut options = Options {
        target: Target::named(&cli.target)
            .ok_or_else(|| format!("unknown target '{}'; known: {}", cli.target, names.join(", ")))?,
        ..Options::default()
    };
    options.limits.nodes = cli.nodes;
    let optimized = optimize(&program, &options).map_err(|e| e.to_string())?;
    let mut out = summary(&optimized);
    let mut holds = true;
    if cli.explain {
        let (text, held) = proof(&optimized)?;
        out.push_str(&text);
        holds = held;
    }
    Ok((out, holds))
}

fn read(cli: &Cli) -> Result<(String, String), String> {
    match &cli.file {
        Some(path) if path.as_os_str() != "-" => {
            let name = path.display().to_string();
            let text = std::fs::read_to_string(path).map_err(|e| format!("{name}: {e}"))?;
            Ok((name, text))
        }
        _ => {
            let mut text = String::new();
            std::io::stdin()
                .read_to_string(&mut text)
                .map_err(|e| format!("standard input: {e}"))?;
            Ok(("<stdin>".into(), text))
        }
    }
}

fn summary(o: &Optimized) -> String {
    let rules = o.proof.as_ref().map(|p| p.rules()).unwrap_or_default();
    let rules: Vec<String> = rules
        .iter()
        .map(|(n, k)| if *k > 1 { format!("{n} x{k}") } else { n.clone() })
        .collect();
    let rules = if rules.is_empty() {
        "none".into()
    } else {
        rules.join(", ")
    };
    let gap = if o.cost_after > 0.0 {
        100.0 * (o.cost_after - o.lower_bound) / o.cost_after
    } else {
        0.0
    };
    format!(
        "{}\n; cost {:.2} -> {:.2} us on {} (at most {gap:.1}% above the optimum), rules: {rules}\n",
        text::print(&o.output),
        o.cost_before,
        o.cost_after,
        o.target.name,
    )
}

fn proof(o: &Optimized) -> Result<(String, bool), String> {
    let Some(proof) = &o.proof else {
        return Ok((String::new(), true));
    };
    let mut out = format!("; proof, {} steps\n", proof.steps.len());
    for (i, step) in proof.steps.iter().enumerate() {
        let (before, after) = proof.step_text(step).map_err(|e| e.to_string())?;
        let direction = if step.forward { "" } else { " (right to left)" };
        out.push_str(&format!(
            "; {}. {}{direction}\n;    {before}\n;  = {after}\n",
            i + 1,
            step.rule
        ));
    }
    let replay = proof.replay(0, BUDGET).map_err(|e| e.to_string())?;
    out.push_str(&format!(
        "; checked: {} steps evaluated in float64, {} skipped, largest relative difference {:.1e}, {}\n",
        replay.evaluated,
        replay.skipped,
        replay.worst,
        if replay.holds() {
            "the proof holds"
        } else {
            "THE PROOF DOES NOT HOLD"
        }
    ));
    for failure in &replay.failures {
        out.push_str(&format!("; {failure}\n"));
    }
    Ok((out, replay.holds()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_proof_that_does_not_hold_has_exit_code_1() {
        let program = text::parse("(relu (linear w:[4,3] b:[4] x:[2,3]))", Weights::Frozen).unwrap();
        let mut optimized = optimize(&program, &Options::default()).unwrap();
        let (said, holds) = proof(&optimized).unwrap();
        assert!(said.contains("the proof holds"), "{said}");
        assert_eq!(printed("", holds), ExitCode::SUCCESS);
        // The step now ends in its own operand.
        let wrong = optimized.proof.as_mut().unwrap();
        wrong.steps[0].after = wrong.terms.node(wrong.steps[0].before).children[0];
        wrong.steps.truncate(1);
        let (said, holds) = proof(&optimized).unwrap();
        assert!(said.contains("THE PROOF DOES NOT HOLD"), "{said}");
        assert_eq!(printed("", holds), ExitCode::from(BROKEN));
    }
}
