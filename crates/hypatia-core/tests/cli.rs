//! `hypatia-opt` as a person uses it.

use std::io::Write;
use std::process::{Command, Output, Stdio};

fn run(args: &[&str], input: &str) -> Output {
    let mut child = Command::new(env!("CARGO_BIN_EXE_hypatia-opt"))
        .args(args)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    child.stdin.take().unwrap().write_all(input.as_bytes()).unwrap();
    child.wait_with_output().unwrap()
}

#[test]
fn fuses_linear_and_relu() {
    let out = run(&[], "(relu (linear w:[512,784] b:[512] x:[64,784]))");
    let text = String::from_utf8(out.stdout).unwrap();
    assert!(out.status.success());
    assert!(
        text.starts_with("(fused_linear_relu w:[512,784] b:[512] x:[64,784])\n; cost "),
        "{text}"
    );
    assert!(text.contains("rules: fuse-linear-relu"), "{text}");
}

/// What the readme shows, but for costs, which are of the machine.
#[test]
fn the_readme_shows_what_it_prints() {
    let readme = std::fs::read_to_string(format!("{}/../../README.md", env!("CARGO_MANIFEST_DIR"))).unwrap();
    let block = readme
        .split("```\n$ echo '")
        .nth(1)
        .unwrap()
        .split("```")
        .next()
        .unwrap();
    let (program, shown) = block.split_once("' | hypatia-opt --explain\n").unwrap();
    let printed = String::from_utf8(run(&["--explain"], program).stdout).unwrap();
    let lines = |text: &str| -> Vec<String> {
        let kept = text.trim_end().lines().filter(|line| !line.starts_with("; cost"));
        kept.map(str::to_string).collect()
    };
    assert_eq!(lines(&printed), lines(shown));
}

#[test]
fn explains() {
    let out = run(
        &["--explain", "-"],
        "(linear w2:[10,32] none (relu (linear w1:[32,16] none x:[4,16])))",
    );
    let text = String::from_utf8(out.stdout).unwrap();
    assert!(text.contains("1. fused-mlp"), "{text}");
    assert!(text.contains("the proof holds"), "{text}");
}

#[test]
fn a_proof_that_holds_has_exit_code_0() {
    for program in ["(relu (relu x:[4]))", "(sub (neg x:[4]) (neg x))"] {
        let out = run(&["--explain"], program);
        let text = String::from_utf8(out.stdout).unwrap();
        assert!(text.contains("the proof holds"), "{text}");
        assert_eq!(out.status.code(), Some(0), "{text}");
    }
}

#[test]
fn bad_input_has_a_place_and_exit_code_2() {
    for (args, input, message) in [
        (
            &[][..],
            "(relu\n  (linaer w:[5,7] none x:[6,7]))",
            "<stdin>:2:4: there is no op 'linaer'",
        ),
        (
            &[],
            "(mm x:[2,3] y:[4,5])",
            "<stdin>:1:2: mm: inner sizes 3 and 4 differ",
        ),
        (&[], "", "<stdin>:1:1: the program is empty"),
        (
            &["--target", "abacus"],
            "(relu x:[2])",
            "unknown target 'abacus'; known: cpu, h200, gpu",
        ),
        (&["/no/such/file"], "", "/no/such/file: No such file"),
    ] {
        let out = run(args, input);
        let text = String::from_utf8(out.stderr).unwrap();
        assert_eq!(out.status.code(), Some(2), "{text}");
        assert!(text.contains(message), "{text}");
    }
}

#[test]
fn programs_that_ask_for_too_much_are_errors_or_are_not_evaluated() {
    let nested = format!("{}x:[2]{}", "(relu ".repeat(100_000), ")".repeat(100_000));
    let chain: String = (1..20_000).map(|i| format!("(let v{i} (neg v{}))\n", i - 1)).collect();
    for (input, code, said) in [
        ("(relu (relu x:[2147483648]))", 0, "1 skipped"),
        ("(relu (relu (expand x:[1] [1099511627776])))", 0, "skipped"),
        ("(relu x:[9223372036854775807])", 2, "no tensor can have the type"),
        ("(relu x:[4294967296,4294967296])", 2, "no tensor can have the type"),
        ("(relu x:[-9223372036854775808])", 2, "no tensor can have the type"),
        (
            "(cat -1 x:[2305843009213693951] y:[2305843009213693951])",
            2,
            "no tensor can have the type",
        ),
        (&nested, 2, "more than 1000 lists inside of each other"),
        (&format!("(let v0 (neg x:[2]))\n{chain}v19999"), 0, "the proof holds"),
    ] {
        let out = run(&["--explain"], input);
        let text = String::from_utf8(out.stdout).unwrap() + &String::from_utf8(out.stderr).unwrap();
        let start = &input[..input.len().min(60)];
        assert_eq!(
            out.status.code(),
            Some(code),
            "{start}: {}",
            &text[..text.len().min(500)]
        );
        assert!(
            text.contains(said),
            "{start}: {}",
            &text[text.len().saturating_sub(500)..]
        );
    }
}
