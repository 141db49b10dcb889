//! How an entry of the store is written into a file: a head with a checksum, its key, its data.

use std::hash::{DefaultHasher, Hasher};

/// How a file of ours begins.
pub(super) const MAGIC: &[u8; 8] = b"HYPATIA\0";
const VERSION: u32 = 3;
const HEAD: usize = 24;
/// Bytes from which the key of an entry can be read.
pub(super) const MOST_OF_A_KEY: u64 = HEAD as u64 + (1 << 16);

/// A file that is not what this module wrote, and why.
pub(super) type Broken = &'static str;

/// Tells damage, not malice: who may write the folder may write anything. Another release of Rust may have another one;
/// what was kept before is then absent.
fn checksum(bytes: &[u8]) -> u64 {
    let mut hasher = DefaultHasher::new();
    hasher.write(bytes);
    hasher.finish()
}

/// The name of the file for a key. Two keys may have the same: the file says whose it is.
pub(super) fn name(key: &str) -> String {
    format!("{:016x}.entry", checksum(key.as_bytes()))
}

/// The content of a file.
pub(super) fn packed(key: &str, data: &[u8]) -> Vec<u8> {
    let body = [key.as_bytes(), data].concat();
    let length = u32::try_from(key.len()).unwrap_or(u32::MAX);
    let head: [&[u8]; 4] = [
        MAGIC,
        &VERSION.to_le_bytes(),
        &length.to_le_bytes(),
        &checksum(&body).to_le_bytes(),
    ];
    [&head.concat(), body.as_slice()].concat()
}

/// The key and the data of a file.
pub(super) fn parse(content: &[u8]) -> Result<(&str, &[u8]), Broken> {
    let key = parse_key(content)?;
    let body = &content[HEAD..];
    if content[HEAD - 8..HEAD] != checksum(body).to_le_bytes() {
        return Err("the checksum does not fit");
    }
    Ok((key, &body[key.len()..]))
}

/// The key of a file, of its first bytes.
pub(super) fn parse_key(content: &[u8]) -> Result<&str, Broken> {
    let Some((head, body)) = content.split_at_checked(HEAD) else {
        return Err("it is too short");
    };
    if !head.starts_with(MAGIC) {
        return Err("it is no file of this cache");
    }
    if head[8..12] != VERSION.to_le_bytes() {
        return Err("it has another version");
    }
    let length = u32::from_le_bytes([head[12], head[13], head[14], head[15]]);
    let key = body.get(..length as usize).ok_or("its key is cut off")?;
    std::str::from_utf8(key).map_err(|_| "its key is no text")
}
