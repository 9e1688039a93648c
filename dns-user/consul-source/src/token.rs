//! The ACL token, read from a file that may change at any time.

use std::{
    path::{Path, PathBuf},
    time::Duration,
};

use tokio::{sync::Mutex, time::Instant};

/// Time for which a token is used before the file is checked again.
const FRESH: Duration = Duration::from_secs(1);

#[derive(Debug)]
pub(crate) struct Token {
    /// The file; `None` to send requests without a token.
    path: Option<PathBuf>,
    /// Result of the last read.
    last: Mutex<Last>,
}

#[derive(Debug, Default)]
struct Last {
    /// The token; kept while the file is unreadable.
    token: Option<String>,
    /// Time of the last check of the file.
    at: Option<Instant>,
    /// Whether the last read failed; a failure is logged once.
    failed: bool,
}

impl Token {
    /// Creates a reader of this file.
    pub(crate) fn new(path: Option<PathBuf>) -> Self {
        Self { path, last: Mutex::default() }
    }

    /// Returns the current token, if any.
    pub(crate) async fn now(&self) -> Option<String> {
        let path = self.path.as_deref()?;
        let mut last = self.last.lock().await;
        if last.at.is_none_or(|at| at.elapsed() >= FRESH) {
            last.at = Some(Instant::now());
            last.read(path).await;
        }
        last.token.clone()
    }
}

impl Last {
    async fn read(&mut self, path: &Path) {
        let problem = match tokio::fs::read_to_string(path).await {
            // Other characters are invalid in a header.
            Ok(text)
                if text.trim().bytes().all(|byte| byte.is_ascii_graphic()) && !text.trim().is_empty() =>
            {
                if self.failed {
                    tracing::info!("consul.token_file: {}: readable again", path.display());
                }
                self.failed = false;
                self.token = Some(text.trim().to_owned());
                return;
            }
            Ok(_) => "holds no token: one line of printable ASCII is needed".to_owned(),
            Err(error) => format!("cannot be read: {error}"),
        };
        if !self.failed {
            let stays =
                if self.token.is_some() { "the last token stays in use" } else { "requests go without" };
            tracing::warn!("consul.token_file: {}: {problem}; {stays}", path.display());
        }
        self.failed = true;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn last_good_token_stays() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("token");
        let token = Token::new(Some(path.clone()));
        assert_eq!(token.now().await, None);
        for (text, expected) in [("first\n", "first"), ("", "first"), ("second", "second")] {
            std::fs::write(&path, text).expect("written");
            tokio::time::sleep(FRESH).await;
            assert_eq!(token.now().await.as_deref(), Some(expected));
        }
        assert_eq!(Token::new(None).now().await, None);
    }
}
